"""Grammars: output that keeps to a JSON schema or to a form of tool call, token by token."""

import json
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import llguidance.numpy
import numpy as np
from transformers import PreTrainedTokenizerBase

from greenroom.errors import EngineError
from greenroom.server.errors import bad_request


class Grammars:
    """Compiles grammars for one tokenizer. Methods may be called from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        """
        Args:
            vocabulary: width of the logits.
        """
        self._vocabulary = vocabulary
        self._tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary)

    def json_schema(self, schema: dict[str, Any], param: str) -> str:
        """
        Raises:
            ApiError: the schema is wrong, or has what cannot be enforced.
        """
        try:
            return self._checked(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)), param)
        except ValueError as error:
            raise bad_request(f"{param}: {_one_line(error)}", param) from error

    def lark(self, grammar: str, param: str) -> str:
        """The same for a grammar in Lark's notation."""
        try:
            return self._checked(llguidance.LLMatcher.grammar_from_lark(grammar), param)
        except ValueError as error:
            raise bad_request(f"{param}: {_one_line(error)}", param) from error

    def constraint(self, grammar: str) -> "GrammarConstraint":
        """A ``TokenConstraint`` of one output."""
        return GrammarConstraint(llguidance.LLMatcher(self._tokens, grammar), self._vocabulary)

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for."""
        return bytes(self._tokens.decode_bytes([token])) if token < self._tokens.vocab_size else b""

    def _checked(self, grammar: str, param: str) -> str:
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokens)
        if failed or messages:  # a warning is a part of the schema that would not be enforced
            raise bad_request(f"{param} cannot be used: {_one_line(' '.join(messages))}", param)
        return grammar


class GrammarConstraint:
    """A ``TokenConstraint`` over a matcher."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._words = -(-vocabulary // 32)
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary)

    def allowed(self) -> np.ndarray:
        """See ``TokenConstraint``."""
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask)
        self._check()
        return self._mask[0, : self._words].view(np.uint32)

    def accept(self, token: int) -> None:
        """See ``TokenConstraint``."""
        self._matcher.consume_token(token)
        self._check()

    def finished(self) -> bool:
        """See ``TokenConstraint``."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar failed: {_one_line(self._matcher.get_error())}")


def tool_calls_grammar(tools: Sequence[tuple[str, dict[str, Any] | None]], many: bool) -> str:
    """Nothing but calls of these tools, each in the form that ``ToolCallParser`` reads.

    Args:
        tools: name and schema of the arguments.
        many: more than one call may come.
    """
    forms = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in tools
    ]
    calls = " | ".join(f"call_{index}" for index in range(len(forms)))
    rules = [f"call_{index}: %json {json.dumps(form)}" for index, form in enumerate(forms)]
    start = 'start: call ("\\n" call)*' if many else "start: call"
    return "\n".join([start, f'call: "<tool_call>\\n" ({calls}) "\\n</tool_call>"', *rules])


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500]
