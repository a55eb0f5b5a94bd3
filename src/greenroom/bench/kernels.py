"""Each GPU kernel of a decode step by itself, against the memory that it reads."""

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from greenroom import hardware
from greenroom.bench.experts import cpu_name
from greenroom.bench.synthetic import fill_with_noise
from greenroom.errors import ConfigError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore

_FORMAT = ExpertFormat(2048, 768, torch.bfloat16, Activation(ActivationKind.SILU))
"""Qwen3-30B-A3B's."""

_EXPERTS = 128
_TOP_K = 8
_HEADS, _KEY_HEADS, _HEAD_DIM = 32, 4, 128
_POSITIONS = 4096
_EPSILON = 1e-6

_POOL = 240
"""Experts on the device, 2.3 GB: launches take one set after another, so that no cache holds the next one."""

_HOST_POOL = 60
_MOST_LAUNCHES, _FEWEST_LAUNCHES = 100, 12
_GRAPH_BYTES = 4 << 30
"""What a graph's launches read, about, if that lets it have so many."""

_CACHE_BYTES = 50 << 20
_REPEATS = 11
_COPY_BYTES = {"hbm": 1 << 30, "pcie": 256 << 20}
_HEAD_START_CYCLES = 500_000
"""What the device is kept busy with while a graph's launch is under way."""

Launch = Callable[[], object]


@dataclass(frozen=True)
class KernelBenchmark:
    """One kernel at one shape.

    value: microseconds a launch, the median of ``repeats`` graphs of ``launches`` launches each, and so with the gap
    between two kernels. bytes: what it must read and write, each once; None for kernels that move next to nothing.
    gb_s: those bytes a second, in 10^9. bound: microseconds that they take at ``limit_gb_s``, the rate of a large
    copy in the same run: on the device, counting both directions ("hbm"), or from page-locked memory ("pcie").
    share: bound / value. cache_expert_num: experts of a launch that are resident.
    """

    bench: str
    kernel: str
    shape: str
    batch: int
    tokens: int
    cache_expert_num: int
    routing: str
    value: float
    unit: str
    bound: float | None
    bytes: int | None
    gb_s: float | None
    limit: str | None
    limit_gb_s: float | None
    share: float | None
    launches: int
    repeats: int
    device: str
    gpu: str
    cpu: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """Launches of one kernel that do the same to different memory.

    experts: of a launch. nbytes: read and written by each. limit: what bounds it, "hbm" or "pcie".
    """

    kernel: str
    shape: str
    tokens: int
    experts: int
    launches: Sequence[Launch]
    nbytes: int | None = None
    limit: str | None = None


def bench_kernels() -> Iterator[KernelBenchmark]:
    """Every kernel at its shapes, one after another. Takes 5 GB of device memory.

    Raises:
        ConfigError: no GPU.
    """
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        raise ConfigError("the kernel benchmark needs a GPU that torch can use, and triton")
    return _measure_all(torch.device("cuda", torch.cuda.current_device()))


def _measure_all(device: torch.device) -> Iterator[KernelBenchmark]:
    limits = {name: _copy_rate(name, device) for name in _COPY_BYTES}
    for case in _cases(device):
        microseconds, launches = time_launches(case.launches, case.nbytes)
        limit = limits[case.limit] if case.limit else None
        bound = case.nbytes / limit / 1e3 if case.nbytes and limit else None
        yield KernelBenchmark(
            bench="kernels",
            kernel=case.kernel,
            shape=case.shape,
            batch=case.tokens,
            tokens=case.tokens,
            cache_expert_num=case.experts,
            routing="fixed",
            value=microseconds,
            unit="us",
            bound=bound,
            bytes=case.nbytes,
            gb_s=case.nbytes / microseconds / 1e3 if case.nbytes else None,
            limit=case.limit,
            limit_gb_s=limit,
            share=bound / microseconds if bound else None,
            launches=launches,
            repeats=_REPEATS,
            device=str(device),
            gpu=torch.cuda.get_device_name(device),
            cpu=cpu_name(),
        )


def _cases(device: torch.device) -> Iterator[Case]:
    blocks = noise_blocks(_FORMAT, _POOL, device)
    for tokens, experts in ((1, _TOP_K), (16, 80)):
        yield from ExpertLaunches(_FORMAT, blocks, experts, tokens, _TOP_K).cases()
    del blocks
    with HostStore([_FORMAT], [_HOST_POOL], hardware.lock_pages, hardware.unlock_pages) as store:
        fill_with_noise(store, seed=0)
        for experts in (2, 20):
            yield fetch_case(store, experts, device)
        torch.cuda.synchronize(device)
    for rows in (1, 16, 4096):
        yield rms_norm_case(rows, _FORMAT.hidden, device)
    for batch in (1, 16):
        yield attention_case(batch, _HEADS, _KEY_HEADS, _HEAD_DIM, _POSITIONS, device)
    for tokens in (1, 16):
        with handing_over(_FORMAT, _EXPERTS, tokens, _TOP_K, device) as cases:
            yield from cases


def time_launches(launches: Sequence[Launch], nbytes: int | None) -> tuple[float, int]:
    """(median microseconds a launch, launches of a graph), by the device's clock.

    Args:
        launches: taken in turn.
        nbytes: of one of them; large ones are launched fewer times.
    """
    count = max(_FEWEST_LAUNCHES, min(_MOST_LAUNCHES, _GRAPH_BYTES // nbytes if nbytes else _MOST_LAUNCHES))
    for launch in launches:
        launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Kept, so that each launch writes to memory of its own too.
        results = [launches[number % len(launches)]() for number in range(count)]
    graph.replay()
    torch.cuda.synchronize()
    milliseconds = [_device_milliseconds(graph.replay) for _ in range(_REPEATS)]
    del results
    return statistics.median(milliseconds) * 1e3 / count, count


def _device_milliseconds(work: Launch) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # By the time the device gets to the events all of the work is in its queue.
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _copy_rate(limit: str, device: torch.device) -> float:
    """GB/s of a large copy: on the device ("hbm"), where each byte counts twice, or to it ("pcie")."""
    size, on_device = _COPY_BYTES[limit], limit == "hbm"
    target = torch.empty(size, dtype=torch.uint8, device=device)
    if on_device:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    else:
        source = torch.randint(256, (size,), dtype=torch.uint8).pin_memory()
    times = [_device_milliseconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(_REPEATS + 1)][1:]
    return size * (2 if on_device else 1) / statistics.median(times) / 1e6


def noise_blocks(fmt: ExpertFormat, count: int, device: torch.device) -> torch.Tensor:
    """uint8 [count, block_bytes] on ``device``: experts with normal weights."""
    values = torch.empty(count, fmt.block_bytes // fmt.dtype.itemsize, dtype=fmt.dtype, device=device)
    return values.normal_(std=0.02).view(torch.uint8)


class ExpertLaunches:
    """The two expert kernels on resident experts, each set of which lies elsewhere in ``blocks``.

    Token ``t`` takes experts ``t * top_k`` and so on of a set, round and round, so that all of them are used.

    Attributes:
        hidden, weights: the batch. ids: int32 [tokens, top_k], the choices within a set.
        partial: float32 [tokens, top_k, hidden], what the second kernel writes.
    """

    def __init__(self, fmt: ExpertFormat, blocks: torch.Tensor, experts: int, tokens: int, top_k: int) -> None:
        """blocks: uint8 [a multiple of experts, block_bytes]."""
        if not top_k <= experts <= tokens * top_k or len(blocks) % experts:
            raise ValueError(f"{tokens} tokens with {top_k} choices cannot use all of {experts} experts a set")
        device = blocks.device
        self._format, self._device, self._experts = fmt, device, experts
        self.sets = len(blocks) // experts
        self.hidden = torch.randn(tokens, fmt.hidden, device=device).to(fmt.dtype)
        pairs = torch.arange(tokens * top_k, device=device, dtype=torch.int32)
        self.ids = (pairs % experts).view(tokens, top_k)
        self.weights = torch.rand(tokens, top_k, device=device)
        self.partial = torch.zeros(tokens, top_k, fmt.hidden, device=device)
        self._blocks = blocks
        addresses = blocks.data_ptr() + torch.arange(len(blocks), device=device) * fmt.block_bytes
        self._address = addresses.view(self.sets, experts)
        self._expert = torch.arange(experts, device=device, dtype=torch.int32)
        self._rows = torch.full_like(self._expert, fmt.inter)
        self._num = torch.tensor([experts, 0, 0], device=device, dtype=torch.int32)
        self._act = torch.randn(experts, tokens, fmt.inter, device=device).to(fmt.dtype)
        self._spans = torch.zeros(4, device=device, dtype=torch.int64)

    def cases(self) -> list[Case]:
        """Both kernels over all sets in turn."""
        fmt, (tokens, top_k) = self._format, self.ids.shape
        size, act = fmt.dtype.itemsize, self._experts * tokens * fmt.inter
        up = self._experts * fmt.up_rows * fmt.hidden + tokens * fmt.hidden + act
        down = self._experts * fmt.hidden * fmt.inter + act
        shape = f"{self._experts} experts, hidden {fmt.hidden}, inter {fmt.inter}"
        return [
            Case("up", shape, tokens, self._experts, self._all(self.up), size * up, "hbm"),
            Case(
                "down",
                shape,
                tokens,
                self._experts,
                self._all(self.down),
                size * down + self.partial.element_size() * tokens * top_k * fmt.hidden,
                "hbm",
            ),
        ]

    def _all(self, kernel: Callable[[int], None]) -> Sequence[Launch]:
        return [partial(kernel, number) for number in range(self.sets)]

    def up(self, number: int) -> None:
        """The first projection with the experts of a set."""
        import triton

        from greenroom.kernels.gpu.expert_ffn import ALL, up_kernel
        from greenroom.kernels.gpu.tiling import choose_tilings

        fmt, tokens = self._format, len(self.hidden)
        tiling, _ = choose_tilings(tokens)
        offset, _, bias_offset, _, _ = fmt.offsets
        up_kernel[(triton.cdiv(fmt.inter, tiling.rows), self._experts)](
            self._act,
            self.hidden,
            self._address[number],
            self._rows,
            self._num,
            offset,
            bias_offset,
            fmt.activation.alpha,
            fmt.activation.limit,
            TOKENS=tokens,
            HIDDEN=fmt.hidden,
            INTER=fmt.inter,
            KIND=int(fmt.activation.kind),
            GATED=fmt.gated,
            BIAS=fmt.bias,
            CLAMPED=fmt.activation.limit != float("inf"),
            PART=ALL,
            WIDEN=self._device.type != "cuda",
            **tiling.arguments(),
        )

    def down(self, number: int) -> None:
        """The second projection with the experts of a set, of what ``up`` left."""
        import triton

        from greenroom.kernels.gpu.expert_ffn import ALL, down_kernel
        from greenroom.kernels.gpu.tiling import choose_tilings

        fmt, (tokens, top_k) = self._format, self.ids.shape
        _, tiling = choose_tilings(tokens)
        _, offset, _, bias_offset, _ = fmt.offsets
        down_kernel[(triton.cdiv(fmt.hidden, tiling.rows), self._experts)](
            self.partial,
            self._act,
            self.ids,
            self.weights,
            self._address[number],
            self._expert,
            self._rows,
            self._num,
            self._spans,
            offset,
            bias_offset,
            TOKENS=tokens,
            TOP_K=top_k,
            HIDDEN=fmt.hidden,
            INTER=fmt.inter,
            BIAS=fmt.bias,
            TIMED=self._device.type == "cuda",
            PART=ALL,
            WIDEN=self._device.type != "cuda",
            **tiling.arguments(),
        )


def fetch_case(store: HostStore, experts: int, device: torch.device, target: torch.Tensor | None = None) -> Case:
    """The fetch kernel with ``experts`` experts of the store's first layer a launch, others each time.

    Args:
        target: uint8 [experts, block_bytes] on ``device``, to look at what was copied.
    """
    import triton

    from greenroom.experts.decode_path import _FETCH_BLOCK, _FETCH_STRETCH
    from greenroom.kernels.gpu.fetch import fetch_kernel

    fmt = store.formats[0]
    addresses = torch.from_numpy(store.addresses(0).astype("int64")).to(device)
    sets = addresses[: len(addresses) // experts * experts].view(-1, experts)
    buffer = torch.empty(experts, fmt.block_bytes, dtype=torch.uint8, device=device) if target is None else target
    targets = buffer.data_ptr() + torch.arange(experts, dtype=torch.int64, device=device) * fmt.block_bytes
    num = torch.tensor([experts, experts, experts], dtype=torch.int32, device=device)

    def launch(sources: torch.Tensor) -> None:
        fetch_kernel[(triton.cdiv(fmt.block_bytes, 4 * _FETCH_STRETCH), experts)](
            sources, targets, num, fmt.block_bytes, STRETCH=_FETCH_STRETCH, BLOCK=_FETCH_BLOCK
        )

    launches = [partial(launch, sources) for sources in sets]
    return Case(
        "fetch", f"{experts} experts of {fmt.block_bytes} bytes", 1, 0, launches, experts * fmt.block_bytes, "pcie"
    )


def rms_norm_case(rows: int, width: int, device: torch.device) -> Case:
    """Each launch norms other rows."""
    from greenroom.kernels.gpu.rms_norm import rms_norm

    nbytes = 2 * rows * width * torch.bfloat16.itemsize
    weight = torch.rand(width, device=device).to(torch.bfloat16)
    batches = torch.randn(_sets(nbytes), rows, width, device=device).to(torch.bfloat16)
    launches = [partial(rms_norm, batch, weight, _EPSILON) for batch in batches]
    return Case("rms_norm", f"{rows} x {width}", rows, 0, launches, nbytes + weight.nbytes, "hbm")


def attention_case(batch: int, heads: int, key_heads: int, dim: int, positions: int, device: torch.device) -> Case:
    """One new token a sequence, which sees all cached positions. Both of attention's kernels."""
    from greenroom.kernels.gpu.decode_attention import decode_attention

    nbytes = 2 * batch * key_heads * positions * dim * torch.bfloat16.itemsize
    query = torch.randn(batch, heads, 1, dim, device=device).to(torch.bfloat16)
    mask = torch.ones(batch, 1, 1, positions, dtype=torch.bool, device=device)
    shape = (_sets(nbytes), 2, batch, key_heads, positions, dim)
    caches = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    def launch(cache: torch.Tensor) -> torch.Tensor:
        return decode_attention(query, cache[0], cache[1], mask, dim**-0.5)

    launches = [partial(launch, cache) for cache in caches]
    label = f"{positions} positions, {heads}/{key_heads} heads x {dim}"
    return Case("decode_attention", label, batch, 0, launches, nbytes, "hbm")


def _sets(nbytes: int) -> int:
    """How many memories of ``nbytes`` each are more than any cache holds; not more than a graph has launches."""
    return min(_MOST_LAUNCHES, max(2, 4 * _CACHE_BYTES // nbytes))


@contextmanager
def handing_over(
    fmt: ExpertFormat, experts: int, tokens: int, top_k: int, device: torch.device
) -> Iterator[list[Case]]:
    """Dispatch and combine with everything on the CPU: dispatch posts the batch, combine reads the CPU's sums.

    Nobody answers meanwhile, and nobody waits.
    """
    import numpy as np

    from greenroom.experts.decode_path import DecodePath

    # Its pages are never touched: the kernels only compute addresses.
    with HostStore([fmt], [experts]) as store, CpuExperts(1) as engine:
        boxes = Mailboxes(engine, store, tokens, top_k, pin_memory=device.type == "cuda")
        slots = [torch.empty(0, fmt.block_bytes, dtype=torch.uint8, device=device)]
        slot_of = torch.full((1, experts), -1, dtype=torch.int32, device=device)
        path = DecodePath(store, slots, slot_of, boxes, tokens, top_k)
        path.begin_step(tokens, np.zeros(experts + 1, dtype=np.int32))
        hidden = torch.randn(tokens, fmt.hidden, device=device).to(fmt.dtype)
        ids = torch.rand(tokens, experts, device=device).argsort(-1)[:, :top_k].contiguous()
        weights = torch.rand(tokens, top_k, device=device)
        # The launches exactly as a layer makes them.
        dispatch = partial(path._dispatch, 0, fmt, hidden, ids, weights)
        combine = partial(path._combine, 0, hidden, tokens)
        shape = f"{top_k} of {experts} experts, hidden {fmt.hidden}"
        try:
            yield [Case("dispatch", shape, tokens, 0, [dispatch]), Case("combine", shape, tokens, 0, [combine])]
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            boxes.close()
