"""What must hold of the source as a whole: which way imports point, no prints, one version, a plain wheel."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain
from pathlib import Path

import pytest

import greenroom

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "greenroom"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the top down: a package may import those after it, never those before it.
LAYERS = ("cli server bench serving engine vllm_plugin experts kv weights kernels hardware config errors").split()
ENGINE_LIBRARIES = {"transformers", "vllm", "huggingface_hub", "tokenizers", "safetensors"}


def imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports, at its top or inside a function; what only types need is left out."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "greenroom":
                yield from (f"greenroom.{alias.name}" for alias in node.names)
        todo += ast.iter_child_nodes(node)


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    return LAYERS.index(parts[1]) if parts[0] == "greenroom" and len(parts) > 1 and parts[1] in LAYERS else None


def test_there_is_something_to_check():
    assert {path.parent.name for path in MODULES} >= {"cli", "engine", "experts"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    name = ".".join(["greenroom", *path.relative_to(PACKAGE).with_suffix("").parts])
    here = layer_of(name)
    for module in imports(path):
        there = layer_of(module)
        if here is not None and there is not None:
            assert there >= here, f"{name} imports {module}"


@pytest.mark.parametrize(
    "path",
    [path for core in ("experts", "kv", "weights", "kernels") for path in sorted((PACKAGE / core).rglob("*.py"))],
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_the_core_knows_no_engine(path):
    assert not {module.split(".")[0] for module in imports(path)} & ENGINE_LIBRARIES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_prints_and_no_exits(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"print", "exit", "sys.exit", "os._exit"}, f"line {node.lineno}"


def test_dependencies_have_one_pin_each():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==")[0] for line in lines if line and not line.startswith("#")]
    normal = [re.sub(r"[-_.]+", "-", pin).lower() for pin in pins]
    assert len(set(normal)) == len(normal)
    assert {re.split(r"[<>=!~\[ ]", requirement)[0].lower() for requirement in wanted} <= set(normal)


def test_the_installed_version_is_the_sources():
    try:
        installed = distribution("greenroom")
    except PackageNotFoundError:
        pytest.skip("greenroom is not installed: run from its source")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert installed.version == greenroom.__version__ == project["version"]


def test_the_wheel_serves_every_python():
    try:
        wheel = distribution("greenroom").read_text("WHEEL")
    except PackageNotFoundError:
        pytest.skip("greenroom is not installed: run from its source")
    assert wheel is not None
    assert re.search(r"^Tag: py3-none-", wheel, re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/cli.md", "docs/plan.md", "docs/serve.md", "docs/weights.md"],
)
def test_links_between_documents_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name} links to {target}"
