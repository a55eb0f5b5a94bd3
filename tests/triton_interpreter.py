"""Triton's interpreter, which stands in for a GPU, without two things that take half of its time and change nothing."""

import inspect
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Does nothing where there is no Triton.

    For every call of a kernel and of each of its functions it looks through ``triton.language`` for the builtins: here
    these are found once. And for every sum of integers it computes whether it overflows, which nobody looks at unless
    it debugs.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    builtins = {package: _builtins_of(package, tl.core.is_builtin) for package in packages}

    def patch_builtins(package: Any, *rest: Any) -> None:
        for name in builtins[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtins
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _builtins_of(package: Any, is_builtin: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]
