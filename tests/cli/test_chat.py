"""greenroom chat: turns, commands, ends; its prompt is the model's own chat template."""

import pytest

from greenroom.cli.chat import Conversation
from greenroom.cli.main import app
from greenroom.engine import generation
from greenroom.engine.generation import generate
from tests.reference.tokenizer import make_tokenizer

CHAT = ["chat", "some/model", "--max-tokens", "8"]


def reply(fake, rendered: str) -> str:
    return generate(fake.model, fake.tokenizer, rendered, 8).text


def test_each_turn_continues_the_conversation(runner, fake):
    result = runner.invoke(app, CHAT, input="hello\n\nmore\n")
    assert result.exit_code == 0, result.output
    first = reply(fake, "<user>hello\n<assistant>")
    second = reply(fake, f"<user>hello\n<assistant>{first}\n<user>more\n<assistant>")
    assert result.stdout == f"{first}\n{second}\n"
    assert result.stderr == ""


def test_reset_forgets_and_exit_ends(runner, fake):
    result = runner.invoke(app, CHAT, input="hello\n/reset\nhello\n/exit\nunread\n")
    answer = reply(fake, "<user>hello\n<assistant>")
    assert result.stdout == f"{answer}\n{answer}\n"


def test_system_message_survives_a_reset():
    tokenizer = make_tokenizer()
    conversation = Conversation(tokenizer, "be kind")
    conversation.add("a", "b")
    conversation.reset()
    assert tokenizer.decode(conversation.prompt("x")) == "<system>be kind\n<user>x\n<assistant>"


def test_empty_input(runner, fake):
    result = runner.invoke(app, CHAT, input="")
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_model_without_chat_template(runner, fake):
    fake.tokenizer.chat_template = None
    result = runner.invoke(app, CHAT, input="hello\n")
    assert result.exit_code == 2
    assert "has no chat template" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_reply_ends_where_the_context_does(runner, fake):
    prompt = "<user>hello\n<assistant>"
    result = runner.invoke(app, ["chat", "some/model"], input="hello\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == generate(fake.model, fake.tokenizer, prompt, 256 - len(prompt)).text + "\n"


def test_a_conversation_longer_than_the_context(runner, fake):
    result = runner.invoke(app, CHAT, input="a" * 300 + "\n")
    assert result.exit_code == 2
    assert "context holds" in result.stderr


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no system message') }}", "{{ 1 / 0 }}"])
def test_a_template_that_cannot_render(runner, fake, template):
    fake.tokenizer.chat_template = template
    result = runner.invoke(app, CHAT, input="hello\n")
    assert result.exit_code == 2
    assert "the model's chat template cannot render this conversation" in result.stderr
    assert (result.stdout, result.stderr.count("\n"), fake.closes) == ("", 1, 1)


def test_input_that_is_no_text(runner, fake):
    result = runner.invoke(app, CHAT, input=b"\xff\xfe\n")
    assert result.exit_code == 2
    assert "is not valid UTF-8" in result.stderr
    assert (result.stdout, result.stderr.count("\n"), fake.closes) == ("", 1, 1)


@pytest.mark.parametrize(
    "flags", [["--max-tokens", "0"], ["--device", "tpu"], ["--temperature", "-1"], ["--system", "\udcff"]]
)
def test_wrong_values(runner, fake, flags):
    result = runner.invoke(app, [*CHAT, *flags], input="hello\n")
    assert result.exit_code == 2
    assert fake.loads == 0


@pytest.mark.parametrize(("flags", "graph"), [([], True), (["--no-graph"], False)])
def test_no_graph(runner, fake, monkeypatch, flags, graph):
    seen: list[bool] = []
    real = generation.generate

    def noting(*args, graph, **kwargs):
        seen.append(graph)
        return real(*args, graph=graph, **kwargs)

    monkeypatch.setattr(generation, "generate", noting)
    result = runner.invoke(app, [*CHAT, *flags], input="hello\n")
    assert result.exit_code == 0, result.output
    assert seen == [graph]
