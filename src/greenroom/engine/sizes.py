"""Sizes that plans, runners and servers share. Pure."""

from greenroom.errors import ConfigError

BUCKETS = (1, 2, 4, 8, 16, 32)
"""Tokens that a decode step is made for; a batch takes the next larger one, its last rows are padding."""

KV_BLOCK = 16
"""Tokens a block of a KV cache, where nobody says otherwise."""


def bucket_for(rows: int) -> int:
    """The smallest bucket that holds ``rows``, which is at most the largest one."""
    return next(size for size in BUCKETS if size >= rows)


def check_batch(rows: int) -> None:
    """
    Raises:
        ConfigError: no bucket holds so many rows, or there are none.
    """
    if not 1 <= rows <= BUCKETS[-1]:
        raise ConfigError(f"a decode batch has 1 to {BUCKETS[-1]} sequences, not {rows}")


def buckets_to(rows: int) -> tuple[int, ...]:
    """All that batches of up to ``rows`` take; of more, some are taken by other means."""
    most = bucket_for(min(rows, BUCKETS[-1]))
    return tuple(size for size in BUCKETS if size <= most)
