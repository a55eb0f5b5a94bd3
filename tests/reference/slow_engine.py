"""An engine that takes each expert from the address it is given, and computes in float64."""

import ctypes

import numpy as np
import torch

from greenroom.experts.formats import ExpertFormat
from tests.reference.expert_math import expert_float64


class SlowEngine:
    """Has ``CpuExperts.run``, and remembers which addresses it read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def run(
        self,
        fmt: ExpertFormat,
        experts: np.ndarray,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        memory: tuple[object, ...] = (),
    ) -> None:
        total = torch.zeros(out.shape, dtype=torch.float64)
        for expert in sorted({e for e in ids.flatten().tolist() if 0 <= e < len(experts)}):
            self.read.append(int(experts[expert]))
            memory = (ctypes.c_uint8 * fmt.block_bytes).from_address(int(experts[expert]))
            views = fmt.views(torch.frombuffer(memory, dtype=torch.uint8).view(1, -1))
            for token, k in (ids == expert).nonzero().tolist():
                total[token] += float(weights[token, k]) * expert_float64(hidden[token].double(), 0, views, fmt)
        out.copy_(total)
