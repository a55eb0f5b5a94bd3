"""Tools: what a model writes becomes calls, however it is cut into pieces; forced calls keep to their grammar."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from greenroom.server.grammar import Grammars, tool_calls_grammar
from greenroom.server.tools import ToolCall, ToolCallParser, writes_tool_calls
from tests.reference.scripted_engine import ScriptedEngine
from tests.reference.tokenizer import VOCAB, make_tokenizer
from tests.server.serving import MODEL, running

TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WRONG = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
TIME = {"type": "function", "function": {"name": "time"}}


def parse(pieces) -> list:
    """Text of neighbouring parts together."""
    parser, found = ToolCallParser(), []
    for part in [part for piece in pieces for part in parser.add(piece)] + parser.end():
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


OSLO = ToolCall("weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("hello", ["hello"]),
        ("  ", ["  "]),
        (CALL, [OSLO]),
        ("\n" + CALL + "\n", [OSLO]),
        (CALL + "\n" + CALL, [OSLO, OSLO]),
        ("I ask. " + CALL + " Done.", ["I ask.", OSLO, " Done."]),
        (CALL.removesuffix("</tool_call>"), [OSLO]),
        ("<tool_call>nonsense</tool_call>", ["<tool_call>nonsense</tool_call>"]),
        ("<tool_call>[1]</tool_call>" + CALL, ["<tool_call>[1]</tool_call>", OSLO]),
        ("a <tool_ca", ["a <tool_ca"]),
        ('<tool_call>{"name": "weather", "arg', ['<tool_call>{"name": "weather", "arg']),
        ("1 < 2 <tool", ["1 < 2 <tool"]),
    ],
)
def test_parser(text, expected):
    assert parse([text]) == expected
    assert parse(text) == expected  # one character a piece


@given(
    parts=st.lists(st.sampled_from([CALL, "text", " ", "<", "<tool_call>", "</tool_call>", "{}", "\n"]), max_size=6),
    data=st.data(),
)
def test_pieces_make_no_difference(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces) == parse([text])


def test_which_templates_write_calls():
    assert writes_tool_calls(TEMPLATE)
    assert not writes_tool_calls("{{ messages }}")
    assert not writes_tool_calls("{{ tools }} <tool_call><function=name>")


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (CALL, True),
        (CALL + "\n" + CALL, True),
        ('<tool_call>\n{"name": "time", "arguments": {"x": 1}}\n</tool_call>', True),
        ("hello", False),
        (CALL.replace("Oslo", "Bonn"), False),
        (CALL.replace("weather", "whether"), False),
    ],
)
def test_forced_calls(text, fits):
    tokenizer = make_tokenizer()
    grammars = Grammars(tokenizer, VOCAB)
    functions = [tool["function"] for tool in (WEATHER, TIME)]
    grammar = grammars.lark(tool_calls_grammar([(f["name"], f.get("parameters")) for f in functions], True), "tools")
    constraint = grammars.constraint(grammar)
    taken = 0
    for token in tokenizer(text)["input_ids"]:
        mask = constraint.allowed()
        if not mask[token // 32] >> (token % 32) & 1:
            break
        constraint.accept(token)
        taken += 1
    assert (taken == len(tokenizer(text)["input_ids"])) is fits
    if fits:
        assert all(isinstance(part, ToolCall) for part in parse([text]))
        end = tokenizer.eos_token_id
        assert constraint.allowed()[end // 32] >> (end % 32) & 1


@pytest.fixture
def served():
    engine = ScriptedEngine()
    engine.tokenizer.chat_template = TEMPLATE
    with (
        running(engine, engine.tokenizer) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield engine, client
    engine.close()


def ask(client, **knobs):
    messages = [{"role": "user", "content": "how is Oslo?"}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "tools": [WEATHER]} | knobs)


def test_calls_and_text(served):
    engine, client = served
    engine.reply = lambda prompt: "I ask." + CALL
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Oslo"}')
    assert call.id
    assert "<tool_call>weather," in engine.tokenizer.decode(engine.prompts[0])


def test_stream(served):
    engine, client = served
    engine.reply = lambda prompt: CALL + "\n" + CALL
    deltas = [chunk.choices[0] for chunk in ask(client, stream=True)]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert calls[0].id != calls[1].id
    assert all(json.loads(call.function.arguments) == {"city": "Oslo"} for call in calls)
    assert not any(choice.delta.content for choice in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


def test_none_means_text(served):
    engine, client = served
    engine.reply = lambda prompt: CALL
    choice = ask(client, tool_choice="none").choices[0]
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert "weather" not in engine.tokenizer.decode(engine.prompts[0])


def test_results_go_back(served):
    engine, client = served
    engine.reply = lambda prompt: "cold"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "how is Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "-3"},
    ]
    assert ask(client, messages=messages).choices[0].message.content == "cold"
    assert "weather:Oslo" in engine.tokenizer.decode(engine.prompts[0])


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "strict"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(served, knobs, says):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match=says):
        ask(served[1], **{"tool_choice": "auto"} | knobs)
