"""A tokenizer for models with random weights."""

from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and the four that every tokenizer has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # transformers brings it

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
