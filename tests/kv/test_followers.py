"""Followers against a search through everything."""

from hypothesis import given
from hypothesis import strategies as st

from greenroom.kv.followers import _CANDIDATES, Followers

PREFIXES = st.sampled_from([b"", b"a"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


def common(first: tuple, second: tuple) -> int:
    count = 0
    while first[: count + 1] == second[: count + 1] and count < min(len(first), len(second)):
        count += 1
    return count


@given(st.lists(st.tuples(st.integers(0, 7), PREFIXES, TOKENS), max_size=30), st.data())
def test_the_longest_is_found(operations: list[tuple], data: st.DataObject) -> None:
    """Fewer blocks than are compared at most, so none can be missed."""
    followers: Followers[int] = Followers()
    model: dict[int, tuple] = {}
    for block, after, tokens in operations:
        if block in model:
            followers.discard(block)
            del model[block]
        else:
            followers.add(block, after, tokens)
            model[block] = after, tokens
        followers.check()
        assert len(followers) == len(model)
        assert all((other in followers) == (other in model) for other in range(8))
        wanted_after, wanted = data.draw(PREFIXES), data.draw(TOKENS)
        usable = data.draw(st.sets(st.integers(0, 7)))
        for allowed in (None, usable):
            counts = {
                other: common(held, wanted)
                for other, (prefix, held) in model.items()
                if prefix == wanted_after and (allowed is None or other in allowed)
            }
            best = max(counts.values(), default=0)
            found = followers.longest(wanted_after, wanted, None if allowed is None else allowed.__contains__)
            assert (found is None) == (best == 0)
            if found is not None:
                assert counts[found[0]] == found[1] == best
                assert followers.tokens(found[0]) == model[found[0]][1]
            followers.check()


def test_of_many_those_are_compared_that_were_found_last() -> None:
    followers: Followers[int] = Followers()
    for block in range(_CANDIDATES + 5):
        followers.add(block, b"", (1, 100 + block))
        assert followers.longest(b"", (1, 100)) == (0, 2)  # and so it stays among the last
    assert followers.longest(b"", (1, 103)) != (3, 2)
    assert followers.longest(b"", ()) is None
