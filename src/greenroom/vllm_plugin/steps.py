"""StepDriver: where a step of a vLLM model begins and ends, and which way its experts go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from greenroom.vllm_plugin.rank import RankExperts


class StepDriver:
    """One a rank. The thread that runs the model calls it."""

    def __init__(self, experts: RankExperts) -> None:
        assert experts.manager is not None
        self._manager = experts.manager
        self._rows: int | None = None

    def attach(self, model: torch.nn.Module) -> None:
        """Makes every call of ``model`` a step."""
        forward = model.forward

        def stepped(*args: Any, **kwargs: Any) -> Any:
            with self._host_step(_count_tokens(kwargs)):
                return forward(*args, **kwargs)

        model.forward = stepped

    @contextmanager
    def counted(self, rows: int) -> Iterator[None]:
        """Steps inside the block are of ``rows`` real tokens, the first of a batch, and are learnt from."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def settle(self) -> None:
        """Waits until no step is under way."""

    def close(self) -> None:
        """No step will follow. Idempotent."""

    @contextmanager
    def _host_step(self, tokens: int) -> Iterator[None]:
        if self._rows is None:
            with self._manager.warm_up(), self._manager.step():
                yield
        else:
            with self._manager.step(None if self._rows >= tokens else np.arange(tokens) < self._rows):
                yield


def _count_tokens(kwargs: dict[str, Any]) -> int:
    """Rows of the batch, padding included."""
    for name, dimension in (("input_ids", 0), ("inputs_embeds", 0), ("positions", -1)):
        tensor = kwargs.get(name)
        if isinstance(tensor, torch.Tensor):
            return tensor.shape[dimension]
    raise RuntimeError("vLLM called the model without input_ids, inputs_embeds or positions")
