"""How the tokens of one pass are shared out. Pure."""

from collections.abc import Sequence

_OLDEST_SHARE = 4


def share_tokens(pending: Sequence[int], budget: int) -> list[int]:
    """Tokens of each sequence that a pass takes.

    Sequences that decode get their one token first. What is left is for prompts. A quarter of it is the oldest
    one's, so that it never starves; the rest goes to the one with least left to do, then to the next. So a long
    prompt costs a short one the pass under way and hardly more, and equal prompts end one after the other.

    Args:
        pending: tokens that each sequence waits for, at least 1, the oldest first.
        budget: tokens of a pass.

    Returns:
        One number for each, 0 if it has to wait.
    """
    shares = [0] * len(pending)

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
    for index in sorted(prompts, key=lambda index: pending[index] - shares[index]):
        budget -= give(index, budget)
    return shares
