"""Writers: pieces of output in, OpenAI's objects out, whole or as chunks of a stream."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from greenroom.server.outputs import Usage
from greenroom.server.tools import ToolCall, ToolCallParser
from greenroom.serving.requests import Finished, Piece, TokenLogprob

TokenText = Callable[[int], tuple[str, list[int] | None]]
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Writer(Protocol):
    """Writes one response, from one task."""

    def begin(self) -> list[dict[str, Any]]:
        """Chunks that come before all pieces."""

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Chunks of new output."""

    def finished(self, index: int, event: Finished) -> list[dict[str, Any]]:
        """Chunks at an output's end."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk behind all others that says what was used."""

    def whole(self, usage: Usage) -> dict[str, Any]:
        """All that came, as one response."""


class _Choices:
    """What both kinds share: ids and the shape of a response."""

    def __init__(self, prefix: str, kind: str, model: str, include_usage: bool) -> None:
        self._head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = include_usage

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [*choices], **({"usage": None} if self._include_usage else {})}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage_dict(usage)}


class ChatWriter(_Choices):
    """chat.completion and chat.completion.chunk."""

    def __init__(
        self, model: str, choices: int, token_text: TokenText, *, stream: bool, include_usage: bool, tools: bool
    ) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk" if stream else "chat.completion", model, include_usage)
        self._token_text = token_text
        self._parsers = [ToolCallParser() if tools else None for _ in range(choices)]
        self._texts = [""] * choices
        self._calls: list[list[dict[str, Any]]] = [[] for _ in range(choices)]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(choices)]
        self._reasons: list[str | None] = [None] * choices

    def begin(self) -> list[dict[str, Any]]:
        return [
            self._chunk(self._choice(index, {"role": "assistant", "content": ""})) for index in range(len(self._texts))
        ]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        logprobs = [self._describe(entry) for entry in piece.logprobs]
        self._logprobs[index] += logprobs
        parser = self._parsers[index]
        parts: Sequence[str | ToolCall] = parser.add(piece.text) if parser else [piece.text] if piece.text else []
        deltas = self._take(index, parts)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        return self._chunks(index, deltas, logprobs)

    def finished(self, index: int, event: Finished) -> list[dict[str, Any]]:
        parser = self._parsers[index]
        deltas = self._take(index, parser.end()) if parser else []
        reason = "tool_calls" if self._calls[index] and event.reason == "stop" else event.reason.value
        self._reasons[index] = reason
        return [*self._chunks(index, deltas, []), self._chunk(self._choice(index, {}, reason=reason))]

    def whole(self, usage: Usage) -> dict[str, Any]:
        choices = []
        for index, text in enumerate(self._texts):
            calls = [{key: value for key, value in call.items() if key != "index"} for call in self._calls[index]]
            message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            logprobs = self._logprobs[index]
            choices.append(
                {
                    "index": index,
                    "message": message | ({"tool_calls": calls} if calls else {}),
                    "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
                    "finish_reason": self._reasons[index],
                }
            )
        return {**self._head, "choices": choices, "usage": usage_dict(usage)}

    def _take(self, index: int, parts: Sequence[str | ToolCall]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                self._texts[index] += part
                deltas.append({"content": part})
                continue
            call = {
                "index": len(self._calls[index]),
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            self._calls[index].append(call)
            deltas.append({"tool_calls": [call]})
        return deltas

    def _chunks(
        self, index: int, deltas: Sequence[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The first one carries the log probabilities."""
        return [
            self._chunk(self._choice(index, delta, logprobs if number == 0 else None))
            for number, delta in enumerate(deltas)
        ]

    @staticmethod
    def _choice(
        index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        described = {"content": logprobs, "refusal": None} if logprobs else None
        return {"index": index, "delta": delta, "logprobs": described, "finish_reason": reason}

    def _describe(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in entry.top]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._token_text(token)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": data}


class CompletionWriter(_Choices):
    """text_completion, whole or in chunks."""

    def __init__(
        self,
        model: str,
        echo: Sequence[str],
        token_text: TokenText,
        *,
        include_usage: bool,
        logprobs: bool,
    ) -> None:
        """
        Args:
            echo: what each output begins with.
        """
        super().__init__("cmpl", "text_completion", model, include_usage)
        self._token_text = token_text
        self._echo = echo
        self._with_logprobs = logprobs
        self._texts = [*echo]
        self._offsets = [len(text) for text in echo]
        self._logprobs = [_empty_logprobs() for _ in echo]
        self._reasons: list[str | None] = [None] * len(echo)

    def begin(self) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(index, text)) for index, text in enumerate(self._echo) if text]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        self._texts[index] += piece.text
        logprobs = self._describe(index, piece.logprobs) if self._with_logprobs else None
        for name, values in (logprobs or {}).items():
            self._logprobs[index][name] += values
        return [self._chunk(self._choice(index, piece.text, logprobs))] if piece.text or piece.logprobs else []

    def finished(self, index: int, event: Finished) -> list[dict[str, Any]]:
        self._reasons[index] = event.reason.value
        return [self._chunk(self._choice(index, "", reason=event.reason.value))]

    def whole(self, usage: Usage) -> dict[str, Any]:
        choices = [
            self._choice(index, text, self._logprobs[index] if self._with_logprobs else None, self._reasons[index])
            for index, text in enumerate(self._texts)
        ]
        return {**self._head, "choices": choices, "usage": usage_dict(usage)}

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: dict[str, list[Any]] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _describe(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        described = _empty_logprobs()
        for entry in entries:
            text, _ = self._token_text(entry.token_id)
            described["tokens"].append(text)
            described["token_logprobs"].append(max(entry.logprob, _LEAST_LOGPROB))
            described["top_logprobs"].append(
                {self._token_text(token)[0]: max(logprob, _LEAST_LOGPROB) for token, logprob in entry.top}
            )
            described["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(text)
        return described


def usage_dict(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _empty_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
