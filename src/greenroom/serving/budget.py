"""How the tokens of one pass are shared out. Pure."""

from collections.abc import Mapping, Sequence

from greenroom.serving.leaders import Wait

_OLDEST_SHARE = 4


def share_tokens(pending: Sequence[int], budget: int, waits: Mapping[int, Wait] | None = None) -> list[int]:
    """Tokens of each sequence that a pass takes.

    Sequences that decode get their one token first. What is left is for prompts. A quarter of it is the oldest
    one's, so that it never starves; the rest goes to the one with least left to do, then to the next. So a long
    prompt costs a short one the pass under way and hardly more, and equal prompts end one after the other.

    A sequence that waits for another one leaves it its turn, as far as what they have in common goes. If most of
    it differs, so that the wait would delay more than it saves, it takes what nobody else has a use for.

    Args:
        pending: tokens that each sequence waits for, at least 1, the oldest first.
        budget: tokens of a pass.
        waits: who waits for whom, by place. The oldest prompt does not.

    Returns:
        One number for each, 0 if it has to wait.
    """
    shares = [0] * len(pending)
    waits = waits or {}

    def give(index: int, most: int) -> int:
        tokens = min(pending[index] - shares[index], most)
        shares[index] += tokens
        return tokens

    for index, tokens in enumerate(pending):
        if tokens == 1:
            budget -= give(index, budget)
    prompts = [index for index, tokens in enumerate(pending) if tokens > 1]
    if prompts:
        budget -= give(prompts[0], budget // _OLDEST_SHARE)
    turns = sorted(prompts, key=lambda index: pending[index] - shares[index])
    for index in turns:
        if (wait := waits.get(index)) is None:
            budget -= give(index, budget)
        else:
            budget -= give(wait.leader, min(budget, max(0, wait.tokens - shares[wait.leader])))
    for index in turns:
        if (wait := waits.get(index)) is not None and 2 * wait.saves < pending[index]:
            budget -= give(index, budget)
    return shares
