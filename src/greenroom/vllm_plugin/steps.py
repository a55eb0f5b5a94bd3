"""StepDriver: where a step of a vLLM model begins and ends, and which way its experts go.

vLLM runs a model by calling it, or by replaying a graph of such a call. Both come through ``run``. Here every step is
decided by the host, layer by layer; ``gpu_steps`` adds those that are not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from greenroom.vllm_plugin.rank import RankExperts

T = TypeVar("T")


class StepDriver:
    """One a rank. The thread that runs the model calls it.

    Attributes:
        rows: tokens of the batch that come from requests; None while vLLM profiles, warms up or captures. Such steps
            touch no statistics.
        counts: whether steps have anything to decide, and so change the counters.
        way: how layers run, in words.
    """

    counts = True
    way = "the host decides every step, layer by layer"

    def __init__(self, experts: RankExperts) -> None:
        assert experts.manager is not None
        self.manager = experts.manager
        self.rows: int | None = None
        self._inside = False

    def attach(self, model: torch.nn.Module) -> None:
        """Makes every call of ``model`` a step."""
        forward = model.forward

        def stepped(*args: Any, **kwargs: Any) -> Any:
            return self.run(_count_tokens(kwargs), lambda: forward(*args, **kwargs))

        model.forward = stepped

    @contextmanager
    def counted(self, rows: int) -> Iterator[None]:
        """Steps inside the block are of ``rows`` real tokens, the first of a batch."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def run(self, tokens: int, work: Callable[[], T]) -> T:
        """``work`` as a step of ``tokens`` tokens, padding included. A call within a step belongs to it."""
        if self._inside:
            return work()
        self._inside = True
        try:
            return self._run(tokens, work)
        finally:
            self._inside = False

    def run_layer(self, index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One layer within a step: hidden [T, H], ids and weights [T, K] -> [T, H]."""
        return self.manager.layers[index].forward(hidden, ids, weights)

    def settle(self) -> None:
        """Waits until no step is under way, and counts the last one."""

    def close(self) -> None:
        """No step will follow. Idempotent."""

    def _run(self, tokens: int, work: Callable[[], T]) -> T:
        """A step that the host decides."""
        if self.rows is None:
            with self.manager.warm_up(), self.manager.step():
                return work()
        with self.manager.step(None if self.rows >= tokens else np.arange(tokens) < self.rows):
            return work()


def _count_tokens(kwargs: dict[str, Any]) -> int:
    """Rows of the batch, padding included."""
    for name, dimension in (("input_ids", 0), ("inputs_embeds", 0), ("positions", -1)):
        tensor = kwargs.get(name)
        if isinstance(tensor, torch.Tensor):
            return tensor.shape[dimension]
    raise RuntimeError("vLLM called the model without input_ids, inputs_embeds or positions")


class NoSteps(StepDriver):
    """For a model whose layers have nothing to decide: its calls are left alone."""

    counts = False
    way = (
        "all experts have slots: vLLM's own kernels run them, nothing is counted, and policy, cache_topk, "
        "update_expert_num and threads have no effect"
    )

    def attach(self, model: torch.nn.Module) -> None:
        pass
