"""What a request does not say: the model's generation settings decide, or OpenAI's neutral ones."""

import pytest
from transformers import GenerationConfig

from greenroom.errors import ConfigError
from greenroom.serving.open import sampling_defaults
from greenroom.serving.requests import SamplingParams
from tests.reference.families import make_model
from tests.reference.scripted_engine import ScriptedEngine
from tests.server.serving import MODEL, running

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1)


def asked(body: dict, path: str = "/v1/completions", **knobs) -> SamplingParams:
    """What reaches the engine."""
    engine = ScriptedEngine()
    with running(engine, engine.tokenizer, **knobs) as server:
        assert server.post(path, {"model": MODEL, "prompt": "hello", "max_tokens": 3, **body}).status_code == 200
    (params,) = engine.params
    return params


def named(params: SamplingParams) -> tuple:
    return params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty


def test_a_request_that_says_nothing():
    assert named(asked({}, sampling=DEFAULTS)) == (0.6, 0.8, 20, 0.05, 1.1)
    assert named(asked({})) == (1.0, 1.0, 0, 0.0, 1.0)


def test_what_a_request_says_holds():
    said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    assert named(asked(said, sampling=DEFAULTS)) == (0, 1, 0, 0, 1)
    assert named(asked({"top_k": 0}, sampling=DEFAULTS)) == (0.6, 0.8, 0, 0.05, 1.1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20, 0.0, 1.0)),
        ({"do_sample": True}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({}, (1.0, 1.0, 0, 0.0, 1.0)),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, (1.0, 1.0, 0, 0.1, 1.05)),
        ({"do_sample": False}, (0.0, 1.0, 0, 0.0, 1.0)),
    ],
)
def test_the_models_settings(given, expected):
    model = make_model("qwen3_moe")
    model.generation_config = GenerationConfig(**given)
    assert named(sampling_defaults(model)) == expected


def test_settings_that_make_no_sense():
    model = make_model("qwen3_moe")
    model.generation_config = GenerationConfig()
    model.generation_config.temperature = -3.0
    with pytest.raises(ConfigError, match=r"generation settings cannot be used: .*--sampling-defaults openai"):
        sampling_defaults(model)
