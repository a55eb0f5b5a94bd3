"""Random batches with their check, and engines that tests share."""

import copy
import math

import torch

from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.native import Isa
from tests.kernels.reference import Experts, expert_outputs, first_rows_outputs

SILU = Activation(ActivationKind.SILU)


class Batch:
    """Random experts, tokens and routing, with sentinels and repeated experts in it."""

    def __init__(self, format: ExpertFormat, experts: int, topk: int, tokens: int, seed: int, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.format = format
        self.experts = Experts(format, experts, generator, offset)
        self.hidden = torch.randn(tokens, format.hidden, generator=generator).to(format.dtype)
        self.ids = torch.randint(-1, experts + 2, (tokens, topk), generator=generator, dtype=torch.int32)
        self.weights = torch.rand(tokens, topk, generator=generator) + 0.1
        self.divided: tuple[int, int] | None = None

    def run(self, engine: CpuExperts) -> torch.Tensor:
        """The engine's output, written over NaN."""
        out = torch.full((self.hidden.shape[0], self.format.hidden), math.nan)
        engine.run(self.format, self.experts.addresses, self.hidden, self.ids, self.weights, out, self.divided)
        return out

    def only(self, tokens: slice) -> "Batch":
        """The same with some of its tokens."""
        part = copy.copy(self)
        part.hidden, part.ids, part.weights = (
            tensor[tokens].contiguous() for tensor in (self.hidden, self.ids, self.weights)
        )
        return part

    def check(self, out: torch.Tensor, isa: Isa) -> None:
        """Fails if ``out``, with the other side's part of a divided expert, is further from the float64 model than
        rounding explains."""
        reference, size = expert_outputs(self.experts, self.hidden, self.ids, self.weights)
        if self.divided is not None:
            out = out + first_rows_outputs(self.experts, self.hidden, self.ids, self.weights, *self.divided)
        # These two round activations to bf16, 2^-9 of each; the others keep fp32 throughout.
        rounded = self.format.dtype is torch.bfloat16 and isa >= Isa.AVX512_BF16
        error = (out.double() - reference).abs()
        bound = size * (2**-8 if rounded else 1e-5) + 1e-30
        assert bool((error <= bound).all()), f"{isa.label}: error {float((error / bound).max()):.3g} of the bound"


class Engines:
    """Engines by threads and instruction set, created when first asked for."""

    def __init__(self) -> None:
        self._engines: dict[tuple[int, Isa, bool], CpuExperts] = {}

    def get(self, threads: int, isa: Isa, batch_invariant: bool = False) -> CpuExperts:
        key = (threads, isa, batch_invariant)
        if key not in self._engines:
            self._engines[key] = CpuExperts(threads, isa=isa, batch_invariant=batch_invariant)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
