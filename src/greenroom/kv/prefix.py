"""Names of KV blocks: a block's key says which tokens it holds and which came before them."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

BlockKey = bytes
"""SHA-256 over the key of the block before and the block's own tokens: equal keys mean equal prefixes."""

START: BlockKey = b""
"""Stands for the key of the block before the first one."""


def block_keys(tokens: Sequence[int], block_size: int, after: Iterable[BlockKey] = ()) -> list[BlockKey]:
    """Keys of the full blocks of a sequence; a partial tail has none.

    Args:
        tokens: the whole sequence, from its first token.
        block_size: tokens a block.
        after: keys of the first blocks, if known already; they are not computed again.
    """
    keys = list(after)
    before = keys[-1] if keys else START
    known, full = len(keys) * block_size, len(tokens) // block_size * block_size
    if known >= full:
        return keys
    new, size = memoryview(np.asarray(tokens[known:full], dtype="<i8").tobytes()), 8 * block_size
    for first in range(0, len(new), size):
        before = hashlib.sha256(before + new[first : first + size]).digest()
        keys.append(before)
    return keys


def tail_key(after: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Names a block that is not full. No full block has its name, whatever the block size.

    Args:
        after: key of the block before it.
        tokens: those in it.
    """
    return hashlib.sha256(b"tail" + after + np.asarray(tokens, dtype="<i8").tobytes()).digest()
