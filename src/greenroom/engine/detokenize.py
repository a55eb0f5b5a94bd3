"""TokenText: tokens one by one in, their text as soon as it can no longer change out."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class TokenText:
    """Text of one output. The pieces add up to what the tokenizer makes of all tokens, without special ones.

    A token may hold a part of a character: text is certain when it does not end inside of one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # A word's spelling may depend on the one before it (its space above all), so the tokens of the piece
        # handed on last are decoded again as context.
        self._tokens: list[int] = []
        self._done = 0  # of these, those of the last piece

    def add(self, tokens: Sequence[int]) -> str:
        """Text that these tokens made certain; empty if there is none."""
        self._tokens += [token for token in tokens if token not in self._special]
        return self._advance(final=False)

    def end(self) -> str:
        """What is left: a character that was never finished."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self._done == len(self._tokens):
            return ""
        before = self._decode(self._tokens[: self._done])
        piece = self._decode(self._tokens)[len(before) :]
        if not piece or (piece.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return ""
        self._tokens = self._tokens[self._done :]
        self._done = len(self._tokens)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
