"""Tool calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
from dataclasses import dataclass

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A function and its arguments as JSON text."""

    name: str
    arguments: str


def writes_tool_calls(template: str) -> bool:
    """Whether a chat template teaches a model the form that is read here."""
    return "tools" in template and _OPEN in template and "<function=" not in template


class ToolCallParser:
    """Text in pieces of any size in, text and calls in their order out. What is no call stays text.

    Blanks before a call, and behind the last one, are no text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False

    def add(self, piece: str) -> list[str | ToolCall]:
        """What is certain by now."""
        self._held += piece
        found: list[str | ToolCall] = []
        while (start := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, start)
            if end < 0:
                self._take_text(start, found)
                return found
            call = _parse(self._held[start + len(_OPEN) : end])
            if call is None:
                self._take_text(end + len(_CLOSE), found)
                continue
            self._take_text(start, found)
            self._held = self._held[self._held.index(_CLOSE) + len(_CLOSE) :]
            self._after_call = True
            found.append(call)
        self._take_text(len(self._held) - _beginning(self._held, _OPEN), found)
        return found

    def end(self) -> list[str | ToolCall]:
        """What is left: a call that was not closed, if it is whole, or text."""
        held, self._held = self._held, ""
        if held.lstrip().startswith(_OPEN) and (call := _parse(held.lstrip().removeprefix(_OPEN))):
            return [call]
        return [held] if held and not (self._after_call and not held.strip()) else []

    def _take_text(self, length: int, found: list[str | ToolCall]) -> None:
        """Hands on the text before ``length`` but for blanks at its end, which a call may follow."""
        text = self._held[:length].rstrip()
        self._held = self._held[len(text) :]
        if text:
            self._after_call = False
            found.append(text)


def _beginning(text: str, tag: str) -> int:
    """Characters at the end of ``text`` that begin ``tag``."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-size:])), 0)


def _parse(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    return ToolCall(
        value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
