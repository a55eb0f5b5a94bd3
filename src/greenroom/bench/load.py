"""How fast a checkpoint is loaded, and what memory that takes."""

import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from greenroom.bench.experts import cpu_name
from greenroom.bench.shapes import shape_config
from greenroom.config import OffloadConfig
from greenroom.engine.checkpoint import INDEX_FILE, Checkpoint
from greenroom.engine.loader import load
from greenroom.engine.offload import choose_device, close, stats
from greenroom.engine.progress import Progress, byte_bar
from greenroom.errors import ConfigError, GreenroomError

_SHARD_BYTES = 4 * 10**9
_SPARE_BYTES = 16 << 20
"""On the disk, for headers, index, configuration and tokenizer."""

_POOL_VALUES = 1 << 25
_CHUNK_VALUES = 1 << 23
_STD = 0.02

_EXIT_REFUSED = 2


@dataclass(frozen=True)
class LoadBenchmark:
    """``repeats`` loads, each in a process of its own.

    value: ``checkpoint_bytes`` a second in 10^9, of the median of ``load_seconds``, which begin with the call of
    ``greenroom.load`` (its libraries are imported by then) and end when the model is ready.
    checkpoint_bytes: of all tensors. host_bytes: of the experts in host memory.
    peak_rss_bytes: most memory that the process ever had resident, the largest of all loads; base_rss_bytes: what
    it had before the call, so the libraries'. peak_over_model: ``peak_rss_bytes / checkpoint_bytes``.
    """

    bench: str
    shape: str
    batch: int
    tokens: int
    cache_expert_num: int
    routing: str
    value: float
    unit: str
    bound: float | None
    load_seconds: list[float]
    checkpoint_bytes: int
    host_bytes: int
    peak_rss_bytes: int
    base_rss_bytes: int
    peak_over_model: float
    page_locked: bool
    repeats: int
    threads: int
    isa: str
    device: str
    gpu: str | None
    cpu: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def bench_load(
    shape: str, folder: Path | None = None, device: str = "auto", repeats: int = 3, progress: bool = False
) -> LoadBenchmark:
    """Loads a random checkpoint of ``shape`` with no expert cached.

    Nothing is dropped from the page cache: what was just written is read from memory if that is large enough.

    Args:
        folder: where the checkpoint is or will be, and stays; None for a temporary one.
        progress: show a bar on stderr while writing.

    Raises:
        ConfigError: an unknown shape or device, a folder that holds something else, or a disk that is too small.
        GreenroomError: what ``greenroom.load`` refused.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, not {repeats}")
    config = shape_config(shape)
    choose_device(OffloadConfig(device=device).device)  # refuses one that is not there before anything is written
    temporary = tempfile.TemporaryDirectory(prefix="greenroom-bench-") if folder is None else None
    with temporary or nullcontext():
        place = Path(temporary.name) if temporary else Path(folder or "")
        model_bytes = write_checkpoint(config, place, shape, progress)
        loads = [_load_in_child(place, device) for _ in range(repeats)]
    last, peak = loads[-1], max(load["peak_rss_bytes"] for load in loads)
    return LoadBenchmark(
        bench="load",
        shape=shape,
        batch=0,
        tokens=0,
        cache_expert_num=last["cache_expert_num"],
        routing="none",
        value=model_bytes / statistics.median(load["seconds"] for load in loads) / 1e9,
        unit="GB/s",
        bound=None,
        load_seconds=[load["seconds"] for load in loads],
        checkpoint_bytes=model_bytes,
        host_bytes=last["host_bytes"],
        peak_rss_bytes=peak,
        base_rss_bytes=max(load["base_rss_bytes"] for load in loads),
        peak_over_model=peak / model_bytes,
        page_locked=last["page_locked"],
        repeats=repeats,
        threads=last["threads"],
        isa=last["isa"],
        device=last["device"],
        gpu=last["gpu"],
        cpu=cpu_name(),
    )


def _load_in_child(folder: Path, device: str) -> dict[str, Any]:
    """One load in a process of its own, whose peak memory is that of this load alone."""
    code = "from greenroom.bench.load import report_load; report_load()"
    done = subprocess.run([sys.executable, "-c", code, str(folder), device], capture_output=True, text=True)
    if done.returncode == _EXIT_REFUSED:
        raise GreenroomError(done.stderr.strip().splitlines()[-1])
    if done.returncode != 0:
        raise RuntimeError(f"loading ended with exit code {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def report_load() -> None:
    """Loads the folder in ``sys.argv[1]`` on the device in ``sys.argv[2]`` and writes figures as JSON to stdout."""
    folder, device = sys.argv[1:]
    base = _status_bytes("VmRSS")
    started = time.perf_counter()
    try:
        model, _ = load(folder, progress=False, config=OffloadConfig(cache_expert_num=0, device=device))
    except GreenroomError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(_EXIT_REFUSED) from error
    seconds = time.perf_counter() - started
    peak, after = _status_bytes("VmHWM"), stats(model)
    figures = {
        "seconds": seconds,
        "peak_rss_bytes": peak,
        "base_rss_bytes": base,
        "host_bytes": after.host_bytes,
        "page_locked": after.page_locked,
        "cache_expert_num": after.cache_expert_num,
        "threads": after.threads,
        "isa": after.isa,
        "device": after.device,
        "gpu": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
    }
    close(model)
    sys.stdout.write(f"{json.dumps(figures)}\n")


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and the four that every tokenizer has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # transformers brings it

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _unseen(done: int, total: int) -> None:
    """Progress that nobody asked for."""
