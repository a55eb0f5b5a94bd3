"""A checkpoint with random weights, on the disk in the hub's layout."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from greenroom.bench.byte_tokenizer import byte_tokenizer
from greenroom.engine.checkpoint import INDEX_FILE, Checkpoint
from greenroom.engine.progress import Progress, byte_bar
from greenroom.errors import ConfigError, GreenroomError

_SHARD_BYTES = 4 * 10**9
_SPARE_BYTES = 16 << 20
"""On the disk, for headers, index, configuration and tokenizer."""

_POOL_VALUES = 1 << 25
_CHUNK_VALUES = 1 << 23
_STD = 0.02


@dataclass(frozen=True)
class _Tensor:
    """Of the checkpoint, in BF16."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch.bfloat16.itemsize


def write_checkpoint(config: PretrainedConfig, folder: Path, name: str, progress: bool = False) -> int:
    """Makes ``folder`` hold a random model of ``config`` in BF16: shards in the hub's layout, and a tokenizer of bytes.

    A folder that holds it already is left as it is; one in which writing was cut short is written again.

    Args:
        name: of the model, for sentences.

    Returns:
        Bytes of all tensors.

    Raises:
        ConfigError: the folder holds something else, cannot be written, or the disk is too small.
    """
    tensors = _tensors(config)
    total = sum(tensor.nbytes for tensor in tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            if not _is_ours(config, folder):
                raise ConfigError(f"'{folder}' holds something else than a {name} checkpoint; give an empty folder")
            if _is_complete(tensors, folder):
                return total
        free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if free < total + _SPARE_BYTES:
            raise ConfigError(
                f"a {name} checkpoint needs {(total + _SPARE_BYTES) / 1e9:.1f} GB on the disk, and '{folder}' has "
                f"{free / 1e9:.1f} GB free; give a folder on another disk (--folder)"
            )
        for file in folder.glob("*.safetensors"):
            file.unlink()
        config.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        with byte_bar("Writing checkpoint") if progress else nullcontext(_unseen) as report:
            _write_shards(tensors, folder, report)
    except OSError as error:
        raise ConfigError(f"cannot write a checkpoint to '{folder}': {error.strerror or error}") from error
    return total


def _tensors(config: PretrainedConfig) -> list[_Tensor]:
    """What the hub's checkpoints hold: the model's own parameters, but an expert's matrices each by itself."""
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_parameters()
    tensors = []
    for name, parameter in parameters:
        layer, experts, leaf = name.partition(".experts.")
        if not experts:
            tensors.append(_Tensor(name, tuple(parameter.shape)))
            continue
        count, rows, columns = parameter.shape
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[leaf]
        tensors += [
            _Tensor(f"{layer}.experts.{expert}.{part}.weight", (rows // len(parts), columns))
            for expert in range(count)
            for part in parts
        ]
    return tensors


def _is_ours(config: PretrainedConfig, folder: Path) -> bool:
    """Whether the configuration in ``folder`` is ``config``, as ``write_checkpoint`` leaves it."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    expected = json.loads(config.to_json_string())
    versions = {"transformers_version": None}
    return bool(found | versions == expected | versions)


def _is_complete(tensors: list[_Tensor], folder: Path) -> bool:
    try:
        with Checkpoint.open(folder) as checkpoint:
            found = {name: (entry.shape, entry.dtype) for name, entry in checkpoint.tensors.items()}
    except GreenroomError:
        return False
    return found == {tensor.name: (tensor.shape, torch.bfloat16) for tensor in tensors}


def _write_shards(tensors: list[_Tensor], folder: Path, report: Progress) -> None:
    """The index comes last: a folder that has one is complete."""
    (folder / INDEX_FILE).unlink(missing_ok=True)
    shards = _shards(tensors)
    noise, total, done = _Noise(), sum(tensor.nbytes for tensor in tensors), 0
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        with file.open("wb", buffering=0) as stream:
            _write_fully(stream, memoryview(_header(shard)))
            for tensor in shard:
                for chunk in noise.chunks(tensor):
                    _write_fully(stream, chunk)
                    done += len(chunk)
                    report(done, total)
                places[tensor.name] = file.name
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _shards(tensors: list[_Tensor]) -> list[list[_Tensor]]:
    """Runs of tensors of at most ``_SHARD_BYTES`` each, or of one tensor."""
    shards: list[list[_Tensor]] = []
    size = _SHARD_BYTES
    for tensor in tensors:
        if size + tensor.nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _header(tensors: list[_Tensor]) -> bytes:
    """What a safetensors file begins with, padded so that its tensors start at multiples of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


class _Noise:
    """Normal values out of a pool, from a random place each time, so that a large model takes seconds to make."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        pool = torch.empty(_POOL_VALUES).normal_(std=_STD, generator=self._generator)
        self._pool = pool.to(torch.bfloat16).view(torch.uint8).numpy()

    def chunks(self, tensor: _Tensor) -> Iterator[memoryview]:
        """The bytes of ``tensor``; vectors, which scale, are ones."""
        left = math.prod(tensor.shape)
        if len(tensor.shape) == 1:
            yield torch.ones(left, dtype=torch.bfloat16).view(torch.uint8).numpy().data
            return
        while left > 0:
            count = min(left, _CHUNK_VALUES)
            start = int(torch.randint(0, _POOL_VALUES - count, (1,), generator=self._generator))
            yield self._pool[2 * start : 2 * (start + count)].data
            left -= count


def _write_fully(stream: BinaryIO, data: memoryview) -> None:
    """An unbuffered stream may take less than it is given."""
    while data:
        data = data[stream.write(data) :]


def _unseen(done: int, total: int) -> None:
    """Progress that nobody asked for."""
