"""generate: tokens equal to stock transformers, text streamed whole, speed that adds up, sentences for bad input."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from greenroom.engine.generation import check_request, context_length, generate
from greenroom.errors import ConfigError
from tests.reference.families import MAX_POSITIONS, make_model
from tests.reference.tokenizer import VOCAB, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = make_model("qwen3_moe")
    model.resize_token_embeddings(VOCAB)
    return model


def stock_tokens(model: PreTrainedModel, ids: list[int], count: int, **options: object) -> list[int]:
    output = model.generate(torch.tensor([ids]), max_new_tokens=count, **options)
    return output[0, len(ids) :].tolist()


def test_greedy_tokens_are_those_of_stock_generate(model, tokenizer):
    prompt = "In the beginning"
    result = generate(model, tokenizer, prompt, 24)
    ids = tokenizer(prompt)["input_ids"]
    assert list(result.token_ids) == stock_tokens(model, ids, 24, do_sample=False)
    assert result.prompt_tokens == len(ids)
    assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)


def test_token_ids_serve_as_prompt(model, tokenizer):
    ids = tokenizer("In the beginning")["input_ids"]
    assert generate(model, tokenizer, ids, 5).token_ids == generate(model, tokenizer, "In the beginning", 5).token_ids


def test_speed(model, tokenizer):
    result = generate(model, tokenizer, "abc", 5)
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0
    assert result.prefill_tok_s == pytest.approx(3 / result.prefill_seconds)
    assert result.decode_tok_s == pytest.approx(4 / result.decode_seconds)


def test_one_token_has_no_decode_speed(model, tokenizer):
    result = generate(model, tokenizer, "abc", 1)
    assert len(result.token_ids) == 1
    assert result.decode_seconds == 0
    assert result.decode_tok_s is None


def test_stops_at_the_models_end_token(model, tokenizer, monkeypatch):
    expected = list(generate(model, tokenizer, "abc", 8).token_ids)
    end = expected[3]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    ended = list(generate(model, tokenizer, "abc", 8).token_ids)
    assert ended == expected[: expected.index(end) + 1]


def test_settings_of_the_checkpoint_do_not_turn_greedy_into_sampling(model, tokenizer, monkeypatch):
    expected = generate(model, tokenizer, "abc", 8).token_ids
    for name, value in {"do_sample": True, "temperature": 5.0, "top_k": 3, "max_length": 4}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert generate(model, tokenizer, "abc", 8).token_ids == expected


def test_settings_of_the_checkpoint_do_not_narrow_a_sample(model, tokenizer, monkeypatch):
    expected = generate(model, tokenizer, "abc", 16, temperature=1.5, seed=7).token_ids
    narrow = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1, "epsilon_cutoff": 0.1}
    for name, value in narrow.items():
        monkeypatch.setattr(model.generation_config, name, value)
    assert generate(model, tokenizer, "abc", 16, temperature=1.5, seed=7).token_ids == expected


def test_a_seed_repeats_a_sample_and_leaves_torch_alone(model, tokenizer):
    before = torch.get_rng_state()
    first, second = (generate(model, tokenizer, "abc", 16, temperature=1.5, seed=7) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert torch.equal(torch.get_rng_state(), before)
    others = {generate(model, tokenizer, "abc", 16, temperature=1.5, seed=seed).token_ids for seed in range(4)}
    assert len(others) > 1


def test_a_tiny_top_p_is_greedy(model, tokenizer):
    sampled = generate(model, tokenizer, "abc", 8, temperature=1.0, top_p=1e-6, seed=0)
    assert sampled.token_ids == generate(model, tokenizer, "abc", 8).token_ids


class Parrot:
    """Stands in for a model: 'generates' given tokens."""

    def __init__(self, model: PreTrainedModel, token_ids: list[int]) -> None:
        self.device, self.config = model.device, model.config
        self.generation_config = model.generation_config
        self.get_input_embeddings = model.get_input_embeddings
        self._token_ids = token_ids

    def generate(self, input_ids, *, streamer, **_):
        streamer.put(input_ids)
        for token in self._token_ids:
            streamer.put(torch.tensor([token]))
        streamer.end()


@pytest.mark.parametrize("text", ["plain words", "Gr\u00fc\u00dfe, \u65e5\u672c \U0001f3ad!", "a\n\n b  c", " led"])
def test_pieces_add_up_and_no_character_is_torn(model, tokenizer, text):
    pieces: list[str] = []
    parrot = Parrot(model, tokenizer(text)["input_ids"])
    result = generate(parrot, tokenizer, "x", 64, on_text=pieces.append)
    assert "".join(pieces) == result.text == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) == len(text)


def test_an_unfinished_character_is_shown_at_the_end(model, tokenizer):
    ids = tokenizer("a\u65e5")["input_ids"][:-1]
    assert generate(Parrot(model, ids), tokenizer, "x", 8).text == tokenizer.decode(ids)


def test_special_tokens_are_counted_but_not_shown(model, tokenizer):
    ids = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id]
    result = generate(Parrot(model, ids), tokenizer, "x", 8)
    assert (result.text, list(result.token_ids)) == ("ab", ids)


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt(model, tokenizer, prompt):
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate(model, tokenizer, prompt, 4)


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_max_tokens_below_one(max_tokens):
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        check_request("abc", max_tokens)


@pytest.mark.parametrize("prompt", ["\udcff\udcfe", "a\ud800"])
def test_a_prompt_that_is_no_text(prompt):
    with pytest.raises(ConfigError, match="the prompt is not valid UTF-8"):
        check_request(prompt, 4)


@pytest.mark.parametrize("seed", [-(2**63), 0, 2**64 - 1])
def test_seeds_at_the_edge(model, tokenizer, seed):
    assert generate(model, tokenizer, "abc", 1, temperature=1.0, seed=seed).token_ids


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
    ],
)
def test_sampling_numbers_out_of_range(options):
    with pytest.raises(ConfigError, match="must be"):
        check_request("abc", 4, **options)


def test_a_prompt_that_fills_the_context(model, tokenizer):
    assert context_length(model) == MAX_POSITIONS
    longest = "a" * (MAX_POSITIONS - 1)
    assert len(generate(model, tokenizer, longest, 1).token_ids) == 1
    with pytest.raises(ConfigError, match="ask for at most 1,"):
        generate(model, tokenizer, longest, 2)
    with pytest.raises(ConfigError, match=f"shorten the prompt to {MAX_POSITIONS - 1} tokens"):
        generate(model, tokenizer, longest + "a", 1)


def test_tokens_of_another_vocabulary(model, tokenizer):
    with pytest.raises(ConfigError, match="another model"):
        generate(model, tokenizer, [1, VOCAB], 4)


@pytest.mark.parametrize(("max_tokens", "graph", "reason"), [(4, False, "it was asked for"), (1, True, "one token")])
def test_a_result_says_why_its_decode_was_eager(model, tokenizer, max_tokens, graph, reason):
    result = generate(model, tokenizer, "abc", max_tokens, graph=graph)
    assert result.decode == "eager"
    assert reason in result.eager_because
    assert result.prepare_seconds == 0


def test_models_without_offloaded_experts_decode_eagerly(model, tokenizer):
    assert "was not loaded by greenroom" in generate(model, tokenizer, "abc", 3).to_dict()["eager_because"]


def test_generate_leaves_nothing_that_other_modes_cannot_write(model, tokenizer):
    """torch refuses writes outside of inference mode to what was made within."""
    seen: list[bool] = []
    hook = model.register_forward_hook(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    generate(model, tokenizer, "abc", 2)
    hook.remove()
    assert seen
    assert not any(seen)
