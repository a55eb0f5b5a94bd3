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
    """Text in pieces of any size in, text and calls in their order out. What is no call stays text."""

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0

    def add(self, piece: str) -> list[str | ToolCall]:
        """What is certain by now."""
        self._held += piece
        found: list[str | ToolCall] = []
        while True:
            start = self._held.find(_OPEN)
            if start < 0:
                kept = _beginning(self._held, _OPEN)
                if not self._held.strip():
                    kept = len(self._held)  # blanks before a call are not text
                self._take_text(len(self._held) - kept, found)
                return found
            end = self._held.find(_CLOSE, start)
            if end < 0:
                self._take_text(start, found)
                return found
            whole = self._held[start : end + len(_CLOSE)]
            call = _parse(whole[len(_OPEN) : -len(_CLOSE)])
            self._take_text(start if call else start + len(whole), found)
            if call:
                self._held = self._held[len(whole) :]
                self._calls += 1
                found.append(call)

    def end(self) -> list[str | ToolCall]:
        """What is left: a call that was not closed, if it is whole, or text."""
        held, self._held = self._held, ""
        if held.startswith(_OPEN) and (call := _parse(held[len(_OPEN) :])):
            return [call]
        return [held] if held and not (self._calls and not held.strip()) else []

    def _take_text(self, length: int, found: list[str | ToolCall]) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text and not (not text.strip() and (self._calls or self._held.startswith(_OPEN))):
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
