"""Triton's interpreter, which stands in for a GPU: without what takes most of its time and changes nothing, and with
bfloat16 rounded as GPUs do it."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np


def quicken() -> None:
    """Does nothing where there is no Triton."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    _find_builtins_once(tl, interpreter)
    _patch_language_once(tl, interpreter)
    _remember_types(tl, interpreter)
    _round_to_nearest(interpreter)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        # For every sum of integers it would compute whether it overflows, which nobody looks at unless it debugs.
        builder.options = replace(builder.options, sanitize_overflow=False)


class _Made:
    """Takes what would replace a builtin, instead of the scope of a kernel's run."""

    value: Any = None

    def set_attr(self, _package: Any, _name: str, value: Any) -> None:
        self.value = value


def _find_builtins_once(tl: ModuleType, interpreter: Any) -> None:
    """For every kernel it looks through ``triton.language`` for builtins, and makes what replaces them."""
    packages = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    is_builtin: Callable[[Any], bool] = tl.core.is_builtin
    builtins: dict[Any, list[tuple[str, Any, Any]]] = {package: [] for package in packages}
    for package in packages:
        for name, member in inspect.getmembers(package):
            if is_builtin(member):
                made = _Made()
                interpreter._patch_attr(package, name, member, interpreter.interpreter_builder, made)
                builtins[package].append((name, member, made.value))

    def patch_builtins(package: Any, _builder: Any, scope: Any) -> None:
        for name, member, replacement in builtins[package]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, replacement)

    interpreter._patch_builtin = patch_builtins


def _patch_language_once(tl: ModuleType, interpreter: Any) -> None:
    """It replaces the builtins for a kernel, and would again for each call of a function in it."""
    patch_all = interpreter._patch_lang
    is_builtin: Callable[[Any], bool] = tl.core.is_builtin

    def patch_language(function: Any) -> Any:
        seen = [value for value in (function.__globals__.get("tl"), function.__globals__.get("core")) if value]
        if seen and not any(is_builtin(language.load) for language in seen):
            return interpreter._LangPatchScope()
        return patch_all(function)

    interpreter._patch_lang = patch_language


def _remember_types(tl: ModuleType, interpreter: Any) -> None:
    """It makes the types of every intermediate result anew, though there are only so many."""
    core, init_block, init_tensor = tl.core, tl.core.block_type.__init__, tl.core.tensor.__init__
    find_dtype = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.__dict__.update(blocks[key])
        self.element_ty = element_ty

    def make_tensor(self: Any, handle: Any, its_type: Any) -> None:
        key = tuple(its_type.shape) if its_type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, its_type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[key], handle=handle, type=its_type, dtype=its_type.scalar)

    def get_dtype(its_type: Any) -> Any:
        if its_type.name not in dtypes:
            dtypes[its_type.name] = find_dtype(its_type)
        return dtypes[its_type.name]

    core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor
    interpreter._get_np_dtype = get_dtype


def _round_to_nearest(interpreter: Any) -> None:
    """It rounds float32 to bfloat16 towards zero, and converts either way bit by bit."""
    convert_bits = interpreter._convert_float
    towards_zero = interpreter._ir.ROUNDING_MODE.RTZ

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source.name, target.name) == ("bf16", "fp32"):
            return data.astype(np.uint32) << 16
        if (source.name, target.name) == ("fp32", "bf16") and rounding != towards_zero:
            return _nearest_bfloat16(data.view(np.uint32))
        return convert_bits(data, source, target, rounding)

    interpreter._convert_float = convert


def _nearest_bfloat16(bits: np.ndarray) -> np.ndarray:
    """uint16 of float32's ``bits``, uint32: ties to even; what is no number stays none."""
    no_number = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(no_number, (bits >> 16) | 0x40, rounded).astype(np.uint16)
