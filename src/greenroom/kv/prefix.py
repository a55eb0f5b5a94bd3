"""Names of KV blocks: a block's key says which tokens it holds and which came before them."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

BlockKey = bytes
"""SHA-256 over the key of the block before and the block's own tokens: equal keys mean equal prefixes."""


def block_keys(tokens: Sequence[int], block_size: int, after: Iterable[BlockKey] = ()) -> list[BlockKey]:
    """Keys of the full blocks of a sequence; a partial tail has none.

    Args:
        tokens: the whole sequence, from its first token.
        block_size: tokens a block.
        after: keys of the first blocks, if known already; they are not computed again.
    """
    keys = list(after)
    before = keys[-1] if keys else b""
    for first in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        block = np.asarray(tokens[first : first + block_size], dtype="<i8").tobytes()
        before = hashlib.sha256(before + block).digest()
        keys.append(before)
    return keys
