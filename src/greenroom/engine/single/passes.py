"""SinglePass: whether the pass that is under way has one token of one sequence."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.engine.single.attention import SingleAttention


class SinglePass:
    """Stands around a model's forward.

    In such a pass torch works on one thread: what is left to it is too small to divide, and its other threads would
    keep the engine's from their cores.

    Attributes:
        active: such a pass is under way. Never while torch compiles.
    """

    def __init__(self, model: PreTrainedModel, attention: SingleAttention | None) -> None:
        """attention: for such passes; None leaves it to the model."""
        self.active = False
        self._attention = attention
        model.forward = self._around(model.forward)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled() or not _has_one_token(args, kwargs):
                return forward(*args, **kwargs)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self.active = True
            try:
                with self._attention.used() if self._attention is not None else nullcontext():
                    return forward(*args, **kwargs)
            finally:
                self.active = False
                torch.set_num_threads(threads)

        return run


def _has_one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
    return "paged" not in kwargs and isinstance(tokens, torch.Tensor) and tokens.shape[:2] == (1, 1)
