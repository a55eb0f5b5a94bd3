"""EnginePass: which rows of the pass that is under way the CPU engine takes."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.engine.single.attention import SingleAttention


class EnginePass:
    """Stands around a model's forward, and knows what its parts are called for.

    The engine takes part where a pass has one token of one sequence, or packed sequences. In the first torch works on
    one thread: what is left to it is too small to divide, and its other threads would keep the engine's from their
    cores.

    Attributes:
        active: the engine takes part. Never while torch compiles.
        tokens: of the pass.
        singles: the first tokens of the pass, each the only new one of its sequence. So is a token treated whether it
            is alone in its pass or not.
    """

    def __init__(self, model: PreTrainedModel, attention: SingleAttention | None) -> None:
        """attention: for passes of one token; None leaves it to the model."""
        self.active = False
        self.tokens = self.singles = 0
        self._attention = attention
        model.forward = self._around(model.forward)

    def singles_among(self, rows: int) -> int:
        """How many of the first rows are single tokens', if there is one row a token; otherwise 0."""
        return self.singles if self.active and rows == self.tokens else 0

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            shape = None if torch.compiler.is_compiling() or torch.is_grad_enabled() else _shape_of(args, kwargs)
            if shape is None:
                return forward(*args, **kwargs)
            lone = "paged" not in kwargs
            threads = torch.get_num_threads()
            if lone:
                torch.set_num_threads(1)
            self.active, (self.tokens, self.singles) = True, shape
            try:
                with self._attention.used() if lone and self._attention is not None else nullcontext():
                    return forward(*args, **kwargs)
            finally:
                self.active, self.tokens, self.singles = False, 0, 0
                if lone:
                    torch.set_num_threads(threads)

        return run


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens of a pass and how many of the first are single, or None if the engine takes no part in it."""
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
    if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.shape[0] != 1:
        return None
    paged, count = kwargs.get("paged"), tokens.shape[1]
    if paged is None:
        return (1, 1) if count == 1 else None
    # Of cached latents, rows of keys pass through dense layers, not those of tokens.
    return None if paged.cache.latent else (count, paged.singles)
