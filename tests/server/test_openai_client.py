"""OpenAI's own client against the example model."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest
import torch

from tests.server.serving import MODEL, until

PROMPTS = [
    f"{start} {word}" for start in ("In the beginning", "A hacker is", "The king said", "Once") for word in "abcd"
]


def complete(client, prompt, **knobs):
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0} | knobs)


def chat(client, text="Tell me of the sea", **knobs):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0} | knobs
    )


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == 2048


def test_text_is_that_of_transformers(client):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.server.conftest import TINY

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    inputs = tokenizer("In the beginning", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert complete(client, "In the beginning", max_tokens=12).choices[0].text == tokenizer.decode(
        ids, skip_special_tokens=True
    )


def test_stream_is_the_whole(client):
    whole = chat(client)
    chunks = [*chat(client, stream=True, stream_options={"include_usage": True})]
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].text for chunk in complete(client, "Once", stream=True))
    assert text == complete(client, "Once").choices[0].text


def test_together_as_alone(client):
    alone = [complete(client, prompt, max_tokens=24).choices[0].text for prompt in PROMPTS]
    assert len({*alone}) > 8
    with ThreadPoolExecutor(16) as pool:
        together = [*pool.map(lambda prompt: complete(client, prompt, max_tokens=24).choices[0].text, PROMPTS)]
    assert together == alone


def test_many_prompts_and_choices(client):
    alone = [complete(client, prompt).choices[0].text for prompt in PROMPTS[:3]]
    answer = complete(client, PROMPTS[:3], n=2)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    assert answer.usage.prompt_tokens == sum(complete(client, p).usage.prompt_tokens for p in PROMPTS[:3])
    texts = [""] * 6
    for chunk in complete(client, PROMPTS[:3], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_tokens_and_echo(client, tiny):
    tokens = [1, 300, 301, 302]
    answer = complete(client, tokens, echo=True)
    assert answer.usage.prompt_tokens == 4
    plain = complete(client, tokens).choices[0].text
    prompt = answer.choices[0].text.removesuffix(plain)
    assert prompt + plain == answer.choices[0].text
    assert prompt
    assert complete(client, "Once", echo=True).choices[0].text == "Once" + complete(client, "Once").choices[0].text


def test_stop(client):
    text = complete(client, "In the beginning", max_tokens=40).choices[0].text
    stop = text[10:14]
    for stops in (stop, ["@@@", stop]):
        choice = complete(client, "In the beginning", max_tokens=40, stop=stops).choices[0]
        assert choice.text == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
    streamed = complete(client, "In the beginning", max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_seeds(client):
    def texts(**knobs) -> list[str]:
        return [choice.text for choice in complete(client, "Once", temperature=1.5, n=3, **knobs).choices]

    assert texts(seed=5) == texts(seed=5)
    assert len({*texts(seed=5), *texts(seed=105)}) == 6
    assert texts() != texts()


def test_bias_and_limits(client):
    assert complete(client, "Once", logit_bias={"300": 100}, max_tokens=3).choices[0].text == " be be be"
    answer = chat(client, max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    # top_k of 1 is the likeliest token at any temperature.
    assert (
        complete(client, "Once", temperature=2, extra_body={"top_k": 1}).choices[0].text
        == complete(client, "Once").choices[0].text
    )
    repeated = complete(client, "Once", frequency_penalty=2, presence_penalty=2, max_tokens=40).choices[0].text
    assert repeated != complete(client, "Once", max_tokens=40).choices[0].text


def test_logprobs_of_chat(client):
    choice = chat(client, logprobs=True, top_logprobs=3, max_tokens=8).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 8
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert len(tops) == 3
        assert entry.logprob == tops[0] <= 0
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, max_tokens=8, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]
    assert chat(client).choices[0].logprobs is None


def test_logprobs_of_completions(client):
    choice = complete(client, "Once", logprobs=2, max_tokens=6).choices[0]
    described = choice.logprobs
    assert "".join(described.tokens) == choice.text
    assert described.text_offset == [len("".join(described.tokens[:index])) for index in range(6)]
    assert [max(top.values()) for top in described.top_logprobs] == described.token_logprobs
    assert all(math.isfinite(value) and value <= 0 for value in described.token_logprobs)
    assert complete(client, "Once", logprobs=0, max_tokens=2).choices[0].logprobs.top_logprobs == [{}, {}]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["fish", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_json_schema(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, temperature=1, seed=seed, max_tokens=400)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


BRACE = "98"
"""The token of "}"."""


def test_json_object(client):
    # "}" is likelier than anything else wherever the grammar allows it.
    knobs = {"response_format": {"type": "json_object"}, "max_tokens": 200}
    answer = chat(client, logit_bias={BRACE: 100}, **knobs)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_cached_tokens(client):
    prompt = "A prompt that nobody else uses, of more than a few blocks. " * 4
    complete(client, prompt)
    usage = complete(client, prompt).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    # What the outputs of one request share is not there already.
    assert complete(client, "Something new. " * 20, n=3).usage.prompt_tokens_details.cached_tokens == 0


def test_outputs_of_one_prompt_compute_it_once(client, tiny):
    def computed() -> float:
        metrics = tiny.metrics()
        return metrics["greenroom_prompt_tokens_total", ()] - metrics["greenroom_prefix_cached_tokens_total", ()]

    before = computed()
    usage = complete(client, "What nobody has asked before, at some length. " * 20, n=4).usage
    assert usage.prompt_tokens > 200
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert computed() - before == usage.prompt_tokens + 3


def test_content_in_parts(client):
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "of the sea"}]
    assert chat(client, parts).choices[0].message.content == chat(client).choices[0].message.content


def test_templates_refuse_with_a_sentence(client):
    with pytest.raises(openai.BadRequestError, match="Unknown role: tool"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}], max_tokens=1
        )


def test_cancel_in_the_middle(client, tiny):
    before = tiny.engine.stats().finished.get("cancelled", 0)
    stream = complete(client, "Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(stream)
    assert tiny.engine.stats().running == 1
    stream.close()
    until(lambda: tiny.engine.stats().running == 0)
    assert tiny.engine.stats().finished["cancelled"] == before + 1
    assert tiny.engine.stats().kv_blocks_used == 0


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(client, temperature=9)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        chat(client, model="other")
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, "a b " * 2000)
    assert raised.value.code == "context_length_exceeded"
