"""greenroom generate: flags reach the configuration, JSON is one pure object, bad input is one sentence."""

import json

import pytest

from greenroom.cli.main import app
from greenroom.config import OffloadConfig
from greenroom.engine import generation
from greenroom.engine.generation import generate
from greenroom.errors import CheckpointError

REQUEST = ["generate", "some/model", "--prompt", "In the beginning", "--max-tokens", "12"]


def test_json_is_the_only_output(runner, fake):
    result = runner.invoke(app, [*REQUEST, "--json"])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    value = json.loads(result.stdout)
    expected = generate(fake.model, fake.tokenizer, "In the beginning", 12)
    assert value["text"] == expected.text
    assert value["token_ids"] == list(expected.token_ids)
    assert value["prompt_tokens"] == 16
    assert value["prefill_tok_s"] > 0
    assert value["decode_tok_s"] > 0
    assert value["load_s"] == 0.25
    counts = {"hits": 15, "misses": 9, "copies": 7, "cpu": 7, "evictions": 3}
    assert {name: value[name] for name in counts} == counts
    assert (value["policy"], value["device"], value["isa"]) == ("lfru", "cpu", "avx2")
    assert (value["threads"], value["cache_expert_num"]) == (2, 4)
    assert [layer["hits"] for layer in value["layers"]] == [10, 5]
    assert fake.progress is False


def test_prints_of_libraries_do_not_spoil_json(runner, fake, monkeypatch):
    inner = fake.model.generate

    def noisy(*args, **kwargs):
        print("a library says hello")  # noqa: T201
        return inner(*args, **kwargs)

    monkeypatch.setattr(fake.model, "generate", noisy)
    result = runner.invoke(app, [*REQUEST, "--json"])
    assert json.loads(result.stdout)["token_ids"]
    assert "hello" in result.stderr


def test_one_token_has_no_decode_speed(runner, fake):
    result = runner.invoke(app, ["generate", "m", "--prompt", "a", "--max-tokens", "1", "--json"])
    assert json.loads(result.stdout)["decode_tok_s"] is None


def test_text_on_stdout_and_everything_else_on_stderr(runner, fake):
    result = runner.invoke(app, REQUEST)
    assert result.exit_code == 0, result.output
    assert result.stdout == generate(fake.model, fake.tokenizer, "In the beginning", 12).text + "\n"
    for word in ("prefill", "decode", "tok/s", "15 hits (62%)", "9 misses", "7 copies", "lfru", "avx2"):
        assert word in result.stderr
    assert fake.progress is True


def test_defaults_are_those_of_the_configuration(runner, fake):
    runner.invoke(app, REQUEST)
    assert fake.config == OffloadConfig()
    assert fake.dtype == "auto"


def test_every_flag_reaches_the_configuration(runner, fake):
    flags = "--cache-topk 3 --update-expert-num 4 --context-num-threads 5 --policy static --profile p.npy"
    flags += " --device cpu --isa avx2 --no-pin-memory --dtype float32"
    result = runner.invoke(app, [*REQUEST, "--cache-expert-num", "7", *flags.split()])
    assert result.exit_code == 0, result.output
    assert fake.dtype == "float32"
    assert fake.config == OffloadConfig(
        cache_expert_num=7,
        cache_topk=3,
        update_expert_num=4,
        context_num_threads=5,
        policy="static",
        profile="p.npy",
        device="cpu",
        isa="avx2",
        pin_memory=False,
    )
    runner.invoke(app, [*REQUEST, "--vram", "8GiB"])
    assert fake.config == OffloadConfig(vram="8GiB")


def test_sampling_repeats_with_a_seed(runner, fake):
    flags = ["--temperature", "1.5", "--top-p", "0.9", "--json", "--seed"]
    texts = [json.loads(runner.invoke(app, [*REQUEST, *flags, seed]).stdout)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("flags", "graph"), [([], True), (["--no-graph"], False)])
def test_no_graph(runner, fake, monkeypatch, flags, graph):
    seen: list[bool] = []
    real = generation.generate

    def noting(*args, graph, **kwargs):
        seen.append(graph)
        return real(*args, graph=graph, **kwargs)

    monkeypatch.setattr(generation, "generate", noting)
    result = runner.invoke(app, [*REQUEST, *flags])
    assert result.exit_code == 0, result.output
    assert seen == [graph]


def test_json_says_how_tokens_were_decoded(runner, fake):
    value = json.loads(runner.invoke(app, [*REQUEST, "--json", "--no-graph"]).stdout)
    assert (value["decode"], value["eager_because"]) == ("eager", "it was asked for")
    assert value["prepare_seconds"] == 0
    assert "eager" in runner.invoke(app, REQUEST).stderr


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--seed", str(2**64)], "seed must be between"),
        (["--cache-expert-num", "-1"], "cache_expert_num must be a whole number of at least 0"),
        (["--cache-expert-num", "1", "--vram", "1GiB"], "not both"),
        (["--vram", "much"], "'much' is not a size"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--context-num-threads", "0"], "context_num_threads must be"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(runner, fake, arguments, sentence, as_json):
    result = runner.invoke(app, [*REQUEST, *arguments, *as_json])
    assert_one_sentence(result, sentence)
    assert fake.loads == 0


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_prompt_longer_than_the_context(runner, fake, as_json):
    result = runner.invoke(app, ["generate", "m", "--prompt", "a" * 300, *as_json])
    assert_one_sentence(result, "the prompt has 300 tokens, but the model's context holds 256")


def test_an_error_of_loading_is_one_sentence(runner, fake):
    fake.error = CheckpointError("model.safetensors is truncated")
    assert_one_sentence(runner.invoke(app, REQUEST), "model.safetensors is truncated")


def test_a_bug_is_not_dressed_up_as_a_users_mistake(runner, fake):
    fake.error = KeyError("bug")
    result = runner.invoke(app, REQUEST)
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


def test_interrupted(runner, fake, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake.model, "generate", interrupted)
    assert runner.invoke(app, REQUEST).exit_code == 130


def assert_one_sentence(result, sentence: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
