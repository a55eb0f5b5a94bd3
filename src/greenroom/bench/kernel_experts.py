"""The two GPU kernels that compute resident experts, launched by themselves."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from greenroom.bench.kernel_timing import Case, Launch
from greenroom.experts.formats import ExpertFormat


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
        from greenroom.experts.expert_launches import Entries  # needs triton

        if not top_k <= experts <= tokens * top_k or len(blocks) % experts:
            raise ValueError(f"{tokens} tokens with {top_k} choices cannot use all of {experts} experts a set")
        device = blocks.device
        self._format, self._experts = fmt, experts
        self.sets = len(blocks) // experts
        self.hidden = torch.randn(tokens, fmt.hidden, device=device).to(fmt.dtype)
        pairs = torch.arange(tokens * top_k, device=device, dtype=torch.int32)
        self.ids = (pairs % experts).view(tokens, top_k)
        self.weights = torch.rand(tokens, top_k, device=device)
        self.partial = torch.zeros(tokens, top_k, fmt.hidden, device=device)
        self._blocks = blocks
        addresses = blocks.data_ptr() + torch.arange(len(blocks), device=device) * fmt.block_bytes
        numbers = torch.arange(experts, device=device, dtype=torch.int32)
        rows, num = torch.full_like(numbers, fmt.inter), torch.tensor([experts, 0, 0], device=device, dtype=torch.int32)
        self._entries = [Entries(address, numbers, rows, num) for address in addresses.view(self.sets, experts)]
        self._act = torch.randn(experts, tokens, fmt.inter, device=device).to(fmt.dtype)
        self._spans = torch.zeros(4, device=device, dtype=torch.int64)

    def cases(self) -> list[Case]:
        """Both kernels over all sets in turn."""
        fmt, (tokens, top_k) = self._format, self.ids.shape
        size, act = fmt.dtype.itemsize, tokens * top_k * fmt.inter
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
        from greenroom.experts.expert_launches import launch_up
        from greenroom.kernels.gpu.expert_ffn import ALL

        entries, top_k = self._entries[number], self.ids.shape[1]
        launch_up(self._act, self.hidden, self.ids, top_k, entries, self._experts, self._format, ALL)

    def down(self, number: int) -> None:
        """The second projection with the experts of a set, of what ``up`` left."""
        from greenroom.experts.expert_launches import launch_down
        from greenroom.kernels.gpu.expert_ffn import ALL

        launch_down(
            self.partial,
            self._act,
            self.ids,
            self.weights,
            self._entries[number],
            self._experts,
            self._spans,
            self._format,
            ALL,
        )
