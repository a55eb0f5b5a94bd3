"""The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the tensors' bytes."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from greenroom.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes; the limit that the format itself sets."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint.

    dtype: a torch dtype, or the checkpoint's own name of one that torch lacks.
    offset: bytes from the start of ``file``. nbytes: its size there.
    """

    name: str
    file: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors that ``file`` holds, with every claim of its header checked against its size.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{file} is truncated or no safetensors file: its header should take {length} bytes, "
                    f"the whole file has {size}"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    header = parse_object(raw, file, "header")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _parse_entry(name, value, file, start) for name, value in header.items()}
    _check_coverage(list(entries.values()), file, start, size)
    return entries


def parse_object(raw: bytes, file: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``raw``, every name in it unique; ``what`` of ``file`` is blamed for anything else.

    Raises:
        CheckpointError: it is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the {what} is corrupt ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: the {what} is corrupt (no JSON object); download it again")
    return value


def _parse_entry(name: str, value: Any, file: Path, start: int) -> TensorEntry:
    def is_count(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number >= 0

    value = value if isinstance(value, dict) else {}
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (
        isinstance(dtype, str)
        and isinstance(shape, list)
        and all(map(is_count, shape))
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(map(is_count, offsets))
        and offsets[0] <= offsets[1]
    ):
        raise CheckpointError(f"{file}: the header's entry for tensor '{name}' is corrupt")
    known = _DTYPES.get(dtype, dtype)
    nbytes = offsets[1] - offsets[0]
    if isinstance(known, torch.dtype) and nbytes != (needed := math.prod(shape) * known.itemsize):
        raise CheckpointError(
            f"{file}: tensor '{name}' of shape {shape} and dtype {dtype} needs {needed} bytes, "
            f"but the header gives it {nbytes}"
        )
    return TensorEntry(name, file, known, tuple(shape), start + offsets[0], nbytes)


def _check_coverage(entries: list[TensorEntry], file: Path, start: int, size: int) -> None:
    """The format wants the tensors to fill the data part without overlap or gap."""
    position, last = start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < position:
            raise CheckpointError(f"{file}: tensor '{entry.name}' overlaps {last}")
        if entry.offset > position:
            raise CheckpointError(
                f"{file}: {entry.offset - position} bytes before tensor '{entry.name}' belong to no tensor"
            )
        position, last = entry.offset + entry.nbytes, f"tensor '{entry.name}'"
        if position > size:
            raise CheckpointError(
                f"{file} is truncated: tensor '{entry.name}' ends at byte {position}, the file has {size}; "
                "download it again"
            )
    if position < size:
        raise CheckpointError(f"{file}: {size - position} bytes after {last} belong to no tensor")
