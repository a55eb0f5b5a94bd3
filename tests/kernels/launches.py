"""What kernels are launched with under Triton's interpreter: enough to compile them for a GPU that is not there.

As a program, without the interpreter: ``launches.py FILE`` compiles what ``save`` wrote, and prints what fails.
"""

import inspect
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

ON_A_GPU = {"WIDEN": False, "TIMED": True}
"""Constants that differ there."""

_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments. All tuples are of (name, type or value)."""

    module: str
    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


@contextmanager
def recorded() -> Iterator[set[Launch]]:
    """Fills the set with every launch inside the block, which the interpreter runs as ever."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: set[Launch] = set()
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.add(_describe(self.fn, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noted
    try:
        yield launches
    finally:
        InterpretedFunction.run = run


def save(launches: set[Launch], path: Path) -> None:
    """For a process without the interpreter."""
    path.write_bytes(pickle.dumps(launches))


def _describe(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    parameters = inspect.signature(fn).parameters
    given = inspect.signature(fn).bind(*args, **kwargs).arguments
    types, constants = {}, {}
    for name, value in given.items():
        if "constexpr" in str(parameters[name].annotation) or value is None:
            types[name] = "constexpr"
            constants[name] = ON_A_GPU.get(name, getattr(value, "value", value))
        else:
            types[name] = _type_of(value)
    return Launch(fn.__module__, fn.__name__, tuple(types.items()), tuple(constants.items()), tuple(options.items()))


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _compile(launch: Launch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(launch.module), launch.kernel)
    source = ASTSource(kernel, dict(launch.types), constexprs=dict(launch.constants))
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))


def _main(path: str) -> int:
    failed = 0
    for launch in sorted(pickle.loads(Path(path).read_bytes()), key=repr):
        try:
            _compile(launch)
        except Exception as error:  # whatever a compiler may raise
            failed += 1
            sys.stdout.write(f"{launch.kernel} {dict(launch.constants)}: {error}\n")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
