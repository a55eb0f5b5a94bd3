"""EnginePass: what the pass that is under way may have from the CPU engine and its library."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.engine.single.attention import SingleAttention


class EnginePass:
    """Stands around a model's forward, and knows what its parts are called for.

    In a pass with one token of one sequence torch works on one thread: what is left to it is too small to divide, and
    its other threads would keep the engine's from their cores.

    Attributes:
        active: a pass with one token of one sequence, or over packed sequences. Never while torch compiles.
        single: one with one token of one sequence.
    """

    def __init__(self, model: PreTrainedModel, attention: SingleAttention | None) -> None:
        """attention: for passes of one token; None leaves it to the model."""
        self.active = self.single = False
        self._attention = attention
        model.forward = self._around(model.forward)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return forward(*args, **kwargs)
            packed, single = "paged" in kwargs, _has_one_token(args, kwargs)
            if not packed and not single:
                return forward(*args, **kwargs)
            threads = torch.get_num_threads()
            self.active, self.single = True, not packed
            if self.single:
                torch.set_num_threads(1)
            try:
                with self._attention.used() if self.single and self._attention is not None else nullcontext():
                    return forward(*args, **kwargs)
            finally:
                self.active = self.single = False
                if not packed:
                    torch.set_num_threads(threads)

        return run


def _has_one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
    return isinstance(tokens, torch.Tensor) and tokens.shape[:2] == (1, 1)
