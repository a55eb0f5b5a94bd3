"""OutputText: what a client may see of an output, which ends before the first stop text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from greenroom.engine.detokenize import TokenText


class StopTexts:
    """Holds back text that may be the beginning of a stop text. What comes out does not depend on the pieces' sizes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, piece: str) -> tuple[str, bool]:
        """
        Returns:
            Text that is certain, and whether a stop text came: the one that is complete first, the longest of
            those that end with the same character. Then nothing may be added any more.
        """
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def end(self) -> str:
        """The output ended by itself: what was held back is a part of it."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """Tokens in, text out: whole characters, nothing of a stop text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
        self._text = TokenText(tokenizer)
        self._stops = StopTexts(stops)

    def add(self, token: int) -> tuple[str, bool]:
        """Text that the token made certain, and whether the output ends here."""
        return self._stops.add(self._text.add([token]))

    def end(self) -> tuple[str, bool]:
        """What is left, and whether a stop text ends it."""
        text, stopped = self._stops.add(self._text.end())
        return (text, True) if stopped else (text + self._stops.end(), False)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that begin ``stop``, without all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
