"""share_tokens: nobody stalls."""

from hypothesis import given
from hypothesis import strategies as st

from greenroom.serving.budget import share_tokens

pending = st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=16)


@given(pending, st.integers(16, 256))
def test_the_budget_is_kept_and_used(pending, budget) -> None:
    shares = share_tokens(pending, budget)
    assert all(0 <= share <= tokens for share, tokens in zip(shares, pending, strict=True))
    assert sum(shares) == min(budget, sum(pending))


@given(pending, st.integers(16, 256))
def test_whoever_decodes_goes_on(pending, budget) -> None:
    assert all(share == 1 for share, tokens in zip(share_tokens(pending, budget), pending, strict=True) if tokens == 1)


@given(pending, st.integers(16, 256))
def test_the_oldest_prompt_gets_a_quarter_of_what_decode_leaves(pending, budget) -> None:
    prompts = [index for index, tokens in enumerate(pending) if tokens > 1]
    if prompts:
        left = budget - (len(pending) - len(prompts))
        assert share_tokens(pending, budget)[prompts[0]] >= min(pending[prompts[0]], left // 4)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert share_tokens([100_000, 1, 90], 128) == [37, 1, 90]


def test_equal_prompts_end_one_after_the_other() -> None:
    assert share_tokens([200, 200, 200], 128) == [128, 0, 0]
