"""What is refused before it reaches the engine's thread, and in which words."""

import math

import pytest

from greenroom.errors import ConfigError
from greenroom.serving.params import check_params, check_prompt
from greenroom.serving.requests import SamplingParams

BAD = {
    "temperature": [-0.1, 2.1, math.nan, math.inf],
    "top_p": [0, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1],
    "top_k": [-1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 11, math.inf],
    "max_tokens": [0, -3],
    "seed": [2**63, -(2**63) - 1],
    "logprobs": [-1, 21],
    "logit_bias": [{100: 1.0}, {-1: 1.0}, {3: 101.0}, {3: math.nan}],
    "stop_token_ids": [(100,), (-1,)],
    "stop": [("",), tuple("abcdefghijklmnopq")],
}
GOOD = {
    "temperature": [0, 2],
    "top_p": [1e-6, 1],
    "min_p": [0, 1],
    "top_k": [0, 10**6],
    "presence_penalty": [-2, 2],
    "repetition_penalty": [0.01, 10],
    "max_tokens": [1, None],
    "seed": [2**63 - 1, -(2**63), None],
    "logprobs": [0, 20, None],
    "logit_bias": [{99: -100.0}],
    "stop_token_ids": [(0, 99)],
    "stop": [("a", "\n\n")],
}


def cases(table) -> list[tuple]:
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_out_of_range(name, value) -> None:
    with pytest.raises(ConfigError, match=name):
        check_params(SamplingParams(**{name: value}), 100)


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_at_the_border(name, value) -> None:
    check_params(SamplingParams(**{name: value}), 100)


class TestPrompt:
    def test_room_for_the_output(self) -> None:
        assert check_prompt([1] * 6, SamplingParams(), 10, 100) == 4
        assert check_prompt([1] * 6, SamplingParams(max_tokens=4), 10, 100) == 4
        assert check_prompt([1] * 6, SamplingParams(max_tokens=1), 10, 100) == 1

    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "words"),
        [
            ([], None, "empty"),
            ([100], None, "between 0 and 99"),
            ([-1], None, "between 0 and 99"),
            ([1] * 10, None, "shorten the prompt to 9 tokens"),
            ([1] * 6, 5, "ask for at most 4"),
        ],
    )
    def test_refused(self, prompt, max_tokens, words) -> None:
        with pytest.raises(ConfigError, match=words):
            check_prompt(prompt, SamplingParams(max_tokens=max_tokens), 10, 100)
