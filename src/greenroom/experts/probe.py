"""How fast the CPU engine is on the very experts that it will run."""

import statistics
import time

import numpy as np
import torch

from greenroom.experts.cpu import CpuExperts
from greenroom.experts.store import HostStore

_READS = 8
_READ_EXPERTS = 8
_COMPUTES = 3
_COMPUTE_TOKENS = 128
_COMPUTE_EXPERTS = 8


def cpu_rates(engine: CpuExperts, store: HostStore) -> tuple[float, float]:
    """(bytes of weights a second with one token an expert, operations a second with many). About 0.1 s.

    Experts of all layers take turns, so that the first figure is that of memory and not of a cache.
    """
    reading = [_seconds(engine, store, probe, 1, _READ_EXPERTS) for probe in range(_READS)]
    computing = [_seconds(engine, store, probe, _COMPUTE_TOKENS, _COMPUTE_EXPERTS) for probe in range(_COMPUTES)]
    read = statistics.median(experts * store.formats[layer].block_bytes / s for s, layer, experts in reading)
    flops = statistics.median(
        store.formats[layer].flops(_COMPUTE_TOKENS * experts) / s for s, layer, experts in computing
    )
    return read, flops


def _seconds(engine: CpuExperts, store: HostStore, probe: int, tokens: int, experts: int) -> tuple[float, int, int]:
    """Time of ``tokens`` tokens through ``experts`` experts each; the layer that was used; how many experts."""
    layer = probe % len(store)
    fmt, count = store.formats[layer], store.num_experts[layer]
    experts = min(experts, count)
    chosen = (np.arange(experts) + probe // len(store) * experts) % count
    ids = torch.from_numpy(np.tile(chosen.astype(np.int32), (tokens, 1)))
    hidden = torch.ones(tokens, fmt.hidden, dtype=fmt.dtype)
    out = torch.empty(tokens, fmt.hidden)
    started = time.perf_counter()
    engine.run(fmt, store.addresses(layer), hidden, ids, torch.ones(tokens, experts), out)
    return time.perf_counter() - started, layer, experts
