"""The other GPU kernels of a decode step, launched by themselves on random data."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from greenroom import hardware
from greenroom.bench.kernel_timing import MOST_LAUNCHES, Case
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore

_EPSILON = 1e-6
_CACHE_BYTES = 50 << 20


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
    label, nbytes = f"{experts} experts of {fmt.block_bytes} bytes", experts * fmt.block_bytes
    return Case("fetch", label, 1, 0, launches, nbytes, "pcie", memory=buffer)


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
    return min(MOST_LAUNCHES, max(2, 4 * _CACHE_BYTES // nbytes))


@contextmanager
def handing_over(
    fmt: ExpertFormat, experts: int, tokens: int, top_k: int, device: torch.device
) -> Iterator[list[Case]]:
    """Dispatch and combine with everything on the CPU: dispatch posts the batch, combine reads the CPU's sums.

    Nobody answers meanwhile, and nobody waits.
    """
    import numpy as np

    from greenroom.experts.decode_path import DecodePath
    from greenroom.experts.step_table import StepOrder

    on_gpu = device.type == "cuda"
    # The kernels only compute its addresses, but a path refuses what a GPU could not read.
    with HostStore([fmt], [experts], *hardware.page_locks(on_gpu)) as store, CpuExperts(1) as engine:
        boxes = Mailboxes(engine, store, tokens, top_k, pin_memory=on_gpu)
        slots = [torch.empty(0, fmt.block_bytes, dtype=torch.uint8, device=device)]
        path = DecodePath(store, slots, boxes, tokens, top_k)
        nowhere = np.full((1, experts), -1, dtype=np.int32)
        path.begin_step(StepOrder(tokens, np.zeros(experts + 1, dtype=np.int32), nowhere))
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
            if on_gpu:
                torch.cuda.synchronize(device)
            boxes.close()
