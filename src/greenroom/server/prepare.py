"""Preparation: from a request's body to jobs for the engine. Slow for long prompts, so not for the event loop."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from greenroom.server.errors import bad_request
from greenroom.server.grammar import Grammars, tool_calls_grammar
from greenroom.server.outputs import Job
from greenroom.server.sampling import chat_params, completion_params
from greenroom.server.schema import ChatRequest, CompletionRequest, Message, NamedTool, Tool
from greenroom.server.tools import writes_tool_calls
from greenroom.serving.requests import SamplingParams


@dataclass(frozen=True)
class Prepared:
    """jobs: one an output. echo: text that each output begins with, one entry a prompt."""

    jobs: tuple[Job, ...]
    echo: tuple[str, ...] = ()


class Preparation:
    """Methods may be called from any thread, one at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, defaults: SamplingParams) -> None:
        self._defaults = defaults
        # The engine's thread decodes with the original meanwhile.
        self._tokenizer = copy.deepcopy(tokenizer)
        self.grammars = Grammars(self._tokenizer, vocabulary)

    def chat(self, request: ChatRequest) -> Prepared:
        """
        Raises:
            ApiError: messages that the model's template refuses, or something that cannot be done.
        """
        prompt = self._render(request)
        grammar = self._grammar(request)
        return Prepared(
            tuple(
                Job(
                    0,
                    prompt,
                    chat_params(request, choice, self._defaults),
                    self.grammars.constraint(grammar) if grammar else None,
                )
                for choice in range(request.choices)
            )
        )

    def completion(self, request: CompletionRequest) -> Prepared:
        """The same for prompts as they are."""
        prompts = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
        jobs = tuple(
            Job(index, prompt, completion_params(request, choice, self._defaults))
            for index, prompt in enumerate(prompts)
            for choice in range(request.choices)
        )
        echo = tuple(self._echo(prompt) for prompt in request.prompts) if request.echo else ()
        return Prepared(jobs, echo)

    def token_text(self, token: int) -> tuple[str, list[int] | None]:
        """What a token stands for, as text and as bytes."""
        known = self.grammars.token_bytes(token)
        return known.decode(errors="replace"), list(known)

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text)["input_ids"]]

    def _echo(self, prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        try:
            return str(self._tokenizer.decode(prompt, skip_special_tokens=True))
        except (OverflowError, IndexError, ValueError):
            return ""  # no tokens of this vocabulary: the engine will say so

    def _render(self, request: ChatRequest) -> list[int]:
        template = self._tokenizer.chat_template
        if not template:
            raise bad_request("this model has no chat template; use /v1/completions", code="no_chat_template")
        tools = request.usable_tools
        if tools and not writes_tool_calls(self._template_text(template)):
            raise bad_request(
                "this model's chat template has no tools in the form <tool_call>{JSON}</tool_call>; leave out tools",
                "tools",
            )
        try:
            encoded = self._tokenizer.apply_chat_template(
                [_turn(message) for message in request.messages],
                tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
                add_generation_prompt=True,
                return_dict=True,
                **_template_arguments(request.chat_template_kwargs),
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            reason = " ".join(str(error).split())[:300]
            raise bad_request(f"the model's chat template refuses these messages: {reason}", "messages") from error
        return [int(token) for token in encoded["input_ids"]]

    @staticmethod
    def _template_text(template: str | dict[str, str]) -> str:
        return template if isinstance(template, str) else "\n".join(template.values())

    def _grammar(self, request: ChatRequest) -> str | None:
        if request.forces_tools:
            choice = request.tool_choice
            wanted = [choice.function.name] if isinstance(choice, NamedTool) else None
            tools = [tool for tool in request.usable_tools if wanted is None or tool.function.name in wanted]
            many = wanted is None and request.parallel_tool_calls is not False
            grammar = tool_calls_grammar([(t.function.name, t.function.parameters) for t in tools], many)
            return self.grammars.lark(grammar, "tools")
        _check_unforced(request.usable_tools, request.parallel_tool_calls)
        form = request.response_format
        if form is None or form.type == "text":
            return None
        schema = {"type": "object"} if form.json_schema is None else form.json_schema.schema_ or {"type": "object"}
        return self.grammars.json_schema(schema, "response_format")


_RESERVED = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs "
    "load_audio_from_video processor_kwargs".split()
)


def _template_arguments(given: dict[str, Any] | None) -> dict[str, Any]:
    """
    Raises:
        ApiError: an argument that is not the template's own.
    """
    for name in given or {}:
        if name in _RESERVED or not name.isidentifier():
            raise bad_request(f"chat_template_kwargs cannot have '{name[:64]}'", "chat_template_kwargs")
    return given or {}


def _check_unforced(tools: Sequence[Tool], parallel: bool | None) -> None:
    if tools and parallel is False:
        raise bad_request(
            "parallel_tool_calls of false needs tool_choice 'required' or a named tool", "parallel_tool_calls"
        )
    for tool in tools:
        if tool.function.strict:
            raise bad_request("strict of a tool needs tool_choice 'required' or a named tool", "tools")


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates read it: content is text, arguments of calls are objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    turn: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        calls = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except (ValueError, RecursionError):
                arguments = call.function.arguments
            calls.append(
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            )
        turn["tool_calls"] = calls
    return turn
