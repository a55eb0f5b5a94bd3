"""One token's key and value into a KV cache of fixed size, in one kernel where torch takes five."""

import torch
import triton
import triton.language as tl


@triton.jit
def cache_write_kernel(
    keys,
    values,
    key,
    value,
    length,
    most,
    key_row,
    key_head,
    value_row,
    value_head,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows * HEADS,).

    Args:
        keys, values: written: [rows, HEADS, most, KEY_DIM or VALUE_DIM], contiguous.
        key, value: [rows, HEADS, 1, ...], the last dimension contiguous.
        length: int64 [1], tokens that there are already, less than ``most``.
        key_row, key_head, value_row, value_head: strides.
    """
    program = tl.program_id(0).to(tl.int64)
    row, head = program // HEADS, program % HEADS
    place = program * most + tl.load(length)
    column = tl.arange(0, BLOCK)
    in_key, in_value = column < KEY_DIM, column < VALUE_DIM
    new_key = tl.load(key + row * key_row + head * key_head + column, mask=in_key)
    new_value = tl.load(value + row * value_row + head * value_head + column, mask=in_value)
    tl.store(keys + place * KEY_DIM + column, new_key, mask=in_key)
    tl.store(values + place * VALUE_DIM + column, new_value, mask=in_value)


def write_token(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor
) -> None:
    """Enqueues the write of each row's next token.

    Args:
        keys, values: [B, H, most, D], contiguous.
        key, value: [B, H, 1, D], the last dimension contiguous.
        length: int64 [1] on the device, tokens that each row has already.
    """
    rows, heads, most, key_dim = keys.shape
    value_dim = values.shape[-1]
    cache_write_kernel[(rows * heads,)](
        keys,
        values,
        key,
        value,
        length,
        most,
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK=triton.next_power_of_2(max(key_dim, value_dim)),
        num_warps=1,
    )
