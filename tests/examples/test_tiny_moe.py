"""The example model is a real trained MoE that stock transformers loads, and its text is English.

Nothing here uses greenroom: the checks hold for the files as any other program would read them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny-moe"
MAX_BYTES = 16 * 1024 * 1024

# Ruth 2:1-4 and Psalm 121:1-4 of the King James Version. Both chapters are held out of training, in both translations
# and in the commentary.
HELD_OUT = (
    "And Naomi had a kinsman of her husband's, a mighty man of wealth, of the family of Elimelech; "
    "and his name was Boaz.\n"
    "And Ruth the Moabitess said unto Naomi, Let me now go to the field, and glean ears of corn after him "
    "in whose sight I shall find grace. And she said unto her, Go, my daughter.\n"
    "And she went, and came, and gleaned in the field after the reapers: and her hap was to light on a part "
    "of the field belonging unto Boaz, who was of the kindred of Elimelech.\n"
    "And, behold, Boaz came from Bethlehem, and said unto the reapers, The LORD be with you. "
    "And they answered him, The LORD bless thee.",
    "I will lift up mine eyes unto the hills, from whence cometh my help.\n"
    "My help cometh from the LORD, which made heaven and earth.\n"
    "He will not suffer thy foot to be moved: he that keepeth thee will not slumber.\n"
    "Behold, he that keepeth Israel shall neither slumber nor sleep.",
)

# Bits per character, so that the tokenizer does not matter. A uniform guess among 4096 tokens of some 3.6
# characters costs about 3.3, guessing each letter by its frequency alone about 4.1, and the model, when trained, 1.27
# and 1.21 on these passages. The bound lies a quarter above what was measured and at half of what chance costs.
MAX_BITS_PER_CHARACTER = 1.6

# The commonest words of English, and the archaic forms of them; written down from general knowledge, not from
# the training text. About three words in five of running prose are among them.
COMMON_WORDS = frozenset(
    """
    a about above after again against all alone also always am among an and another any are art as ask asked at
    away back be became because been before began behold being best better between both bring brought but by call
    called came can cannot child children city come cometh could day days death did didst do does doest done door
    dost doth down each earth end even ever every evil eyes face father fear few find fire first for found friend
    from full gave get give given go god goes gone good got great had hand hands hast hath have having he hear heard
    heart heaven her here herself high him himself his house how i if in into is it its itself king knew know known
    land large last law least left less let life light like little long look lord love made make man many may me
    men might mine moment more most mother much must my myself name nature never new night no nor not nothing now
    o of off old on once one only or other our out over own part people perhaps person place power program put
    rather right said same sat saw say saying says see seen sent servant set shall shalt she should small so some
    something son sons soon speak spirit stand still such system take taken tell than that the thee their them
    themselves then there therefore these they thine thing things think this those thou though thought three
    through thus thy time to together told too took towards true truth turn two under unto up upon us use used
    usually very voice was water way we well went were what when where whether which while who whole whom whose why
    will with within without woman women word words work world would ye year years yet you young your yourself
    """.split()
)
PROMPTS = ("In the beginning", "And it came to pass", "hacker: n.", "She was")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer as stock transformers loads it."""
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The model as stock transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def untrained() -> PreTrainedModel:
    """The same architecture with fresh random weights: every check of quality must reject it."""
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32).eval()


@torch.no_grad()
def bits_per_character(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Cross-entropy of ``text`` after a begin token, in bits per character."""
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
    logits = model(input_ids=ids).logits[0, :-1]
    nats = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return nats / math.log(2) / len(text)


@torch.no_grad()
def greedy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int) -> str:
    """Greedy continuation of ``prompt``, without it."""
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def common_share(text: str) -> float:
    """Share of the words of ``text`` that are common English words."""
    words = re.findall(r"[A-Za-z']+", text.lower())
    return sum(word in COMMON_WORDS for word in words) / max(1, len(words))


def all_continuations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Greedy continuations of every prompt, joined."""
    return " ".join(greedy(model, tokenizer, prompt, 40) for prompt in PROMPTS)


def test_folder_is_small() -> None:
    """The whole folder fits in 16 MB."""
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MAX_BYTES


def test_architecture() -> None:
    """Six layers or more, each with 32 experts or more, four or more of them used per token."""
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 6
    assert config.num_experts >= 32
    assert config.num_experts_per_tok >= 4
    assert config.decoder_sparse_step == 1
    assert not config.mlp_only_layers


def test_weights_are_bfloat16() -> None:
    """The stored weights are BF16, and stock transformers finds every one of them."""
    model, info = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", output_loading_info=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("passage", HELD_OUT)
def test_predicts_held_out_text(
    model: PreTrainedModel, untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, passage: str
) -> None:
    """Held-out verses are predicted far better than chance; an untrained model fails the same bound."""
    assert bits_per_character(model, tokenizer, passage) < MAX_BITS_PER_CHARACTER
    assert bits_per_character(untrained, tokenizer, passage) > MAX_BITS_PER_CHARACTER


def test_word_order_matters(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """The same words backwards are predicted worse, so the model knows more than which words are frequent."""
    backwards = " ".join(reversed(HELD_OUT[0].split()))
    forwards = bits_per_character(model, tokenizer, HELD_OUT[0])
    assert bits_per_character(model, tokenizer, backwards) > forwards + 0.5


def test_greedy_text_is_english(
    model: PreTrainedModel, untrained: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """At least half the words are common English words and many differ; an untrained model fails."""
    text = all_continuations(model, tokenizer)
    assert common_share(text) >= 0.5
    assert len(set(text.lower().split())) >= 30
    assert common_share(all_continuations(untrained, tokenizer)) < 0.5


def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    """Any text survives encoding and decoding, and the special tokens are distinct."""
    for text in (HELD_OUT[0], "naïve café — 你好 \U0001f600\n\ttab", "  two  spaces"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """The chat template renders system, user and assistant turns, and refuses other roles."""
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "<|begin|><|system|>S<|end|><|user|>U<|end|><|assistant|>A<|end|>"
    prompt = tokenizer.apply_chat_template(turns[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|user|>U<|end|><|assistant|>"
    with pytest.raises(Exception, match="Unknown role"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("question", ["Define: hacker", "Continue: The LORD is my shepherd; I shall not want."])
def test_chat_answer_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> None:
    """A greedy chat answer is English and ends by itself."""
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    answer = greedy(model, tokenizer, prompt, 200)
    assert len(tokenizer(answer)["input_ids"]) < 199
    assert len(answer.split()) >= 4
    assert common_share(answer) >= 0.35


def test_generation_config() -> None:
    """The stored generation settings end at the tokenizer's end token."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert GenerationConfig.from_pretrained(FOLDER).eos_token_id == tokenizer.eos_token_id
