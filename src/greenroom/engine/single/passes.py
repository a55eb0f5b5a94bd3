"""EnginePass: what the pass that is under way may have from the CPU engine and its library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from greenroom.engine.paged.cache import PagedBatch
from greenroom.engine.single.attention import SingleAttention

_FEW_TOKENS, _FEW_KEYS = 32, 2048
"""Of a packed pass; with twice as many keys torch's attention on one thread takes as long as it saves."""


class EnginePass:
    """Stands around a model's forward, and knows what its parts are called for.

    In a pass with one token of one sequence torch works on one thread: what is left to it is too small to divide, and
    its other threads would keep the engine's from their cores. So it does in packed passes of few tokens and keys if
    the engine multiplies their dense layers.

    Attributes:
        active: a pass with one token of one sequence, or over packed sequences. Never while torch compiles.
        single: one with one token of one sequence.
    """

    def __init__(self, model: PreTrainedModel, attention: SingleAttention | None, always: bool) -> None:
        """
        Args:
            attention: for passes of one token; None leaves it to the model.
            always: the engine multiplies dense layers in all passes, not only, in BF16, in those of one token.
        """
        self.active = self.single = self._running = False
        self._attention = attention
        self._always = always
        model.forward = self._around(model.forward)

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or torch.is_grad_enabled():
                return forward(*args, **kwargs)
            paged = kwargs.get("paged")
            single = paged is None and _has_one_token(args, kwargs)
            if not (paged is not None or single or self._always):
                return forward(*args, **kwargs)
            self.active, self.single, self._running = paged is not None or single, single, True
            try:
                with self._on_one_thread(single) if single or self._is_small(paged) else nullcontext():
                    return forward(*args, **kwargs)
            finally:
                self.active = self.single = self._running = False

        return run

    def multiplies(self, rows: torch.Tensor) -> bool:
        """Whether the engine multiplies ``rows`` [..., H] by a dense layer."""
        alone = self.single and rows.dtype == torch.bfloat16 and rows.numel() == rows.shape[-1]
        return self._running and (self._always or alone)

    def _is_small(self, paged: PagedBatch | None) -> bool:
        """Whether torch has little to do in a packed pass."""
        if paged is None or not self._always:
            return False
        tokens, keys = paged.size
        return tokens <= _FEW_TOKENS and keys <= _FEW_KEYS

    @contextmanager
    def _on_one_thread(self, single: bool) -> Iterator[None]:
        """Whatever torch does inside."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with self._attention.used() if single and self._attention is not None else nullcontext():
                yield
        finally:
            torch.set_num_threads(threads)


def _has_one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
    return isinstance(tokens, torch.Tensor) and tokens.shape[:2] == (1, 1)
