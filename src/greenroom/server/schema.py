"""The bodies of requests: what is understood, and what is refused rather than ignored."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction".split()
)
"""Of OpenAI's fields: leaving them out changes nothing that a client gets."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "functions": ([],),
    "function_call": ("none",),
    "suffix": ("",),
    "moderation": (),
}
"""Fields that are not supported, with the values that ask for nothing."""

MAX_CHOICES = 128
Number = Annotated[float, Field(allow_inf_nan=False)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Body(BaseModel):
    """Types are taken as JSON writes them; unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Common(Body):
    """What both kinds of request have. None is the same as leaving a field out."""

    model: str
    max_tokens: int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, Number] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, description="0 or -1 for all tokens.")
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Token] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        try:
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("texts must be Unicode; this body has half of a surrogate pair") from None
        except (ValueError, RecursionError):
            raise ValueError("the body has NaN or Infinity, or is nested too deeply") from None
        kept = {}
        for name, value in body.items():
            known = name in cls.model_fields
            if name in _HARMLESS and not known:
                continue
            if name in _NEUTRAL and not known:
                if value is not None and value not in _NEUTRAL[name]:
                    raise ValueError(f"{name} is not supported; leave it out")
                continue
            if not known:
                raise ValueError(f"there is no field '{name[:64]}'; leave it out")
            kept[name] = value
        if kept.get("stream_options") is not None and kept.get("stream") is not True:
            raise ValueError("stream_options is for requests with stream; set stream to true or leave it out")
        return kept

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionOfCall(Body):
    name: str
    arguments: str


class CallOfMessage(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionOfCall


class Message(Body):
    """A turn. Content is text, or a list of parts that are text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[CallOfMessage] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise ValueError(f"content of type '{kind[:64]}' is not supported; send text")
        if isinstance(message, dict):
            for name in ("audio", "function_call"):
                if message.get(name) is not None:
                    raise ValueError(f"messages with {name} are not supported")
            return {key: value for key, value in message.items() if value is not None and key != "annotations"}
        return message

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("a message needs content")
        return self


class FunctionOfTool(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionOfTool


class NameOfTool(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NameOfTool


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed for type 'json_schema', and only for it")
        return self


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs set to true")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        names = [tool.function.name for tool in self.tools or ()]
        if len({*names}) < len(names):
            raise ValueError("tools: two functions have the same name")
        if (named or self.tool_choice == "required") and not names:
            raise ValueError("tool_choice asks for a tool, but there are no tools")
        if named and named not in names:
            raise ValueError(f"tool_choice names '{named[:64]}', which is not among tools")
        if self.forces_tools and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format cannot be met by a forced tool call; give one of the two")
        return self

    @property
    def forces_tools(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []


class CompletionRequest(Common):
    prompt: str | list[str] | list[Token] | list[list[Token]]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.choices:
            raise ValueError("best_of is not supported; leave it out, and set n to the number of choices")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of the prompt are not supported; leave out echo or logprobs")
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token")
        if len(self.prompts) * self.choices > MAX_CHOICES:
            raise ValueError(f"prompts times n may be {MAX_CHOICES} at most")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One text or one list of tokens each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
