"""The expert kernels read weights sixteen bytes at a time, and ahead where matrix units take them.

As a program, without Triton's interpreter: prints the kernels' PTX, a JSON object.
"""

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

INTEGERS = {"gpu_ids": "*i32", "entry_expert": "*i32", "entry_rows": "*i32", "entry_num": "*i32"}
TYPES = INTEGERS | {"entry_address": "*i64", "spans": "*i64", "act": "*bf16", "hidden": "*bf16", "partial": "*fp32"}
TYPES |= {"weights": "*fp32", "alpha": "fp32", "limit": "fp32"}
"""Of arguments that are no constants; all others are offsets."""


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_vector_loads"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled: dict[str, str] = json.loads(done.stdout)
    return compiled


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("kernel", ["up_kernel", "down_kernel"])
def test_weights_are_read_in_wide_loads(ptx, kernel, tokens):
    code = ptx[f"{kernel} {tokens}"]
    assert "ld.global.b16" not in code
    assert ("cp.async" if tokens > 1 else "ld.global.v4.b32") in code


def _compile(kernel: Any, tokens: int, constants: dict[str, Any]) -> str:
    """For a GPU that need not be there; arguments are multiples of 16, as the launches' are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(inspect.signature(kernel.fn).parameters)
    types = {name: "constexpr" if name.isupper() else TYPES.get(name, "i32") for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[name] not in ("constexpr", "fp32")
    }
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    given = {(names.index(name),): value for name, value in (constants | {"TOKENS": tokens}).items() if name in names}
    source = ASTSource(kernel, types, constexprs=given, attrs=attributes)
    code: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return code


def _main() -> None:
    from greenroom.kernels.gpu.expert_ffn import ALL, down_kernel, up_kernel
    from greenroom.kernels.gpu.tiling import choose_tilings

    same = {"TOP_K": 8, "HIDDEN": 2048, "INTER": 768, "KIND": 0, "GATED": True, "BIAS": False, "CLAMPED": False}
    same |= {"PART": ALL.value, "WIDEN": False, "TIMED": True}
    found = {
        f"{kernel.fn.__name__} {tokens}": _compile(kernel, tokens, same | tiling.arguments())
        for tokens in (1, 2, 16)
        for kernel, tiling in zip((up_kernel, down_kernel), choose_tilings(tokens, 2), strict=True)
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _main()
