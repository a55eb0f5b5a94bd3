"""Checkpoint: where every tensor of a safetensors checkpoint lies, and how its bytes get out.

Bytes are read, never mapped: mapped pages would count towards the process' memory beside the store that
they are copied into, and loading would need twice the model.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from greenroom.engine.safetensors_header import TensorEntry, parse_object, read_header
from greenroom.errors import CheckpointError, UnsupportedModelError

__all__ = ["Checkpoint", "TensorEntry"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OPEN_FILES = 16
"""Descriptors kept open. A large model has more shards than a small ``ulimit -n`` allows."""
_OTHER_FORMATS = {
    ".gguf": "GGUF",
    ".bin": "PyTorch .bin",
    ".pth": "PyTorch .pth",
    ".pt": "PyTorch .pt",
    ".h5": "Keras .h5",
    ".msgpack": "Flax .msgpack",
    ".onnx": "ONNX",
}


class Checkpoint:
    """The tensors of a model folder. Reads from any number of threads; a context manager."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.tensors = MappingProxyType(dict(tensors))
        self._files = _OpenFiles(OPEN_FILES)

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads every header of ``model.safetensors``, or of the shards that its index names.

        Raises:
            CheckpointError: no checkpoint, a missing, truncated or corrupt file, an index that disagrees.
            UnsupportedModelError: the weights are there in another format.
        """
        folder = Path(folder)
        if (folder / SINGLE_FILE).is_file():
            return cls(folder, read_header(folder / SINGLE_FILE))
        if (folder / INDEX_FILE).is_file():
            return cls(folder, _read_shards(folder))
        raise _explain_absence(folder)

    def read_into(self, entry: TensorEntry, destination: torch.Tensor | memoryview, skip: int = 0) -> None:
        """Fills ``destination`` with the tensor's bytes from byte ``skip`` on.

        Args:
            destination: a contiguous tensor in host memory, of any dtype, or a writable byte buffer.

        Raises:
            CheckpointError: the file ends early or cannot be read.
            ValueError: the destination reaches beyond the tensor.
        """
        buffer = _bytes_of(destination)
        if skip < 0 or skip + len(buffer) > entry.nbytes:
            raise ValueError(f"bytes {skip}..{skip + len(buffer)} are not inside '{entry.name}' ({entry.nbytes} bytes)")
        try:
            with self._files.borrow(entry.file) as descriptor:
                filled = _read_fully(descriptor, buffer, entry.offset + skip)
        except OSError as error:
            raise CheckpointError(f"{entry.file}: cannot read tensor '{entry.name}' ({error.strerror})") from error
        if filled < len(buffer):
            raise CheckpointError(
                f"{entry.file} is truncated: it ends inside tensor '{entry.name}', "
                f"{len(buffer) - filled} bytes short; download it again"
            )

    def close(self) -> None:
        """Closes all files. No read may be in progress. Idempotent."""
        self._files.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _read_shards(folder: Path) -> dict[str, TensorEntry]:
    index = folder / INDEX_FILE
    try:
        raw = index.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read ({error.strerror})") from error
    weight_map = parse_object(raw, index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: the index has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: tensor '{name}' is said to be in {shard!r}, which names no shard")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{folder / shard} is missing; the index expects tensor '{name}' in it")
    tensors: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_header(folder / shard).items():
            if name in tensors:
                raise CheckpointError(f"tensor '{name}' is in two files, {tensors[name].file} and {entry.file}")
            tensors[name] = entry
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(f"{folder / shard} lacks tensor '{name}', which the index expects in it")
    return tensors


def _explain_absence(folder: Path) -> CheckpointError | UnsupportedModelError:
    if not folder.is_dir():
        return CheckpointError(f"there is no folder {folder}")
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    absence = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if strays := [name for name in files if name.endswith(".safetensors")]:
        return CheckpointError(f"{absence}; {strays[0]} is there, but no index names it")
    for suffix, kind in _OTHER_FORMATS.items():
        if found := [name for name in files if name.endswith(suffix)]:
            return UnsupportedModelError(
                f"{folder} holds {kind} weights ({found[0]}); greenroom reads safetensors, so convert it"
            )
    return CheckpointError(absence)


def _bytes_of(destination: torch.Tensor | memoryview) -> memoryview:
    if isinstance(destination, memoryview):
        return destination.cast("B")
    if destination.device.type != "cpu" or not destination.is_contiguous():
        raise ValueError("the destination must be contiguous and in host memory")
    # A view of dtype uint8 keeps the bytes; numpy, which owns the buffer interface, has no bfloat16.
    return destination.detach().view(-1).view(torch.uint8).numpy().data


def _read_fully(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Bytes read; fewer than asked only at the end of the file. One call moves 2 GiB at most."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(descriptor, [buffer[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


class _OpenFiles:
    """A small pool of descriptors; the longest unused one is closed when there are too many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[Path, int] = OrderedDict()
        self._busy: dict[Path, list[int]] = {}  # descriptor, number of users
        self._closed = False

    @contextmanager
    def borrow(self, file: Path) -> Iterator[int]:
        """The file's descriptor, which stays open until the block ends."""
        with self._lock:
            if self._closed:
                raise ValueError("the checkpoint is closed")
            if file not in self._busy:
                self._busy[file] = [self._take(file), 0]
            user = self._busy[file]
            user[1] += 1
        try:
            yield user[0]
        finally:
            with self._lock:
                user[1] -= 1
                if user[1] == 0:
                    del self._busy[file]
                    self._idle[file] = user[0]
                    self._shrink(0 if self._closed else self._limit)

    def _take(self, file: Path) -> int:
        descriptor = self._idle.pop(file, None)
        if descriptor is None:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return descriptor

    def _shrink(self, limit: int) -> None:
        while len(self._idle) > limit:
            os.close(self._idle.popitem(last=False)[1])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._shrink(0)
