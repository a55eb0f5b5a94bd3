"""Text in pieces against text decoded at once; stop texts against a search character by character."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from greenroom.engine.detokenize import TokenText
from greenroom.serving.text import OutputText, StopTexts
from tests.reference.tokenizer import make_tokenizer

TINY_MOE = Path(__file__).parents[2] / "examples" / "tiny-moe"
TOKENIZERS = {"bytes": make_tokenizer(), "tiny-moe": AutoTokenizer.from_pretrained(TINY_MOE)}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_whole_text(name, data) -> None:
    tokenizer = TOKENIZERS[name]
    any_token = st.integers(0, len(tokenizer) - 1)  # special ones and halves of characters as well
    text = st.text(max_size=6).map(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    tokens = [t for part in data.draw(st.lists(text | st.lists(any_token, max_size=5), max_size=6)) for t in part]
    incremental = TokenText(tokenizer)
    pieces = [incremental.add([token]) for token in tokens]
    pieces.append(incremental.end())
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.text(min_size=1, max_size=10))
def test_pieces_end_with_whole_characters(text) -> None:
    tokenizer = TOKENIZERS["bytes"]
    incremental, seen = TokenText(tokenizer), ""
    for token in tokenizer(text)["input_ids"]:
        seen += incremental.add([token])
        assert text.startswith(seen)
    assert seen + incremental.end() == text


def test_the_end_of_a_character_comes_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["bytes"]
    incremental = TokenText(tokenizer)
    assert [incremental.add([token]) for token in tokenizer("a€b")["input_ids"]] == ["a", "", "", "€", "b"]


def test_many_special_tokens_cost_nothing() -> None:
    incremental = TokenText(TOKENIZERS["bytes"])
    assert all(incremental.add([2]) == "" for _ in range(1000))
    assert incremental._tokens == []


def cut_at_stop(text: str, stops) -> tuple[str, bool]:
    """The text before the first stop text that is complete, the longest of those that are complete together."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    st.lists(st.text("abc", max_size=4), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_texts_across_pieces(pieces, stops) -> None:
    expected, whole = cut_at_stop("".join(pieces), stops), "".join(pieces)
    machine, seen = StopTexts(stops), ""
    for count, piece in enumerate(pieces, 1):
        text, stopped = machine.add(piece)
        seen += text
        if stopped:
            assert (seen, True) == expected
            assert cut_at_stop("".join(pieces[:count]), stops)[1]
            return
        assert not cut_at_stop("".join(pieces[:count]), stops)[1]
        held = whole[len(seen) : len("".join(pieces[:count]))]
        assert held == longest_beginning("".join(pieces[:count]), stops), "held back more or less than needed"
    assert (seen + machine.end(), False) == expected


def longest_beginning(text: str, stops) -> str:
    starts = [text[place:] for place in range(len(text))]
    return next((tail for tail in starts if any(stop.startswith(tail) and stop != tail for stop in stops)), "")


class TestOutputText:
    def run(self, text: str, stops=()) -> tuple[str, bool]:
        tokenizer = TOKENIZERS["bytes"]
        output, seen = OutputText(tokenizer, stops), ""
        for token in tokenizer(text)["input_ids"]:
            piece, stopped = output.add(token)
            seen += piece
            if stopped:
                return seen, True
        piece, stopped = output.end()
        return seen + piece, stopped

    def test_stops(self) -> None:
        assert self.run("one.\n\ntwo", ["\n\n"]) == ("one.", True)
        assert self.run("one €€ two", ["€€"]) == ("one ", True)

    def test_a_beginning_of_a_stop_text_is_part_of_the_output_in_the_end(self) -> None:
        assert self.run("one.\n", ["\n\n"]) == ("one.\n", False)

    def test_an_unfinished_character_may_end_a_stop_text(self) -> None:
        tokenizer = TOKENIZERS["bytes"]
        output = OutputText(tokenizer, ["a\N{REPLACEMENT CHARACTER}"])
        tokens = tokenizer("a€")["input_ids"][:2]
        assert [output.add(token) for token in tokens] == [("", False), ("", False)]
        assert output.end() == ("", True)
