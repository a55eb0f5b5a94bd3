"""What is to be run at once, and the memory that it needs beside the weights. Pure."""

from dataclasses import dataclass

from greenroom.config import OffloadConfig
from greenroom.engine.dbo import halvable
from greenroom.engine.model_shape import ModelShape
from greenroom.engine.request import weights_config
from greenroom.engine.sizes import KV_BLOCK, buckets_to
from greenroom.errors import ConfigError
from greenroom.experts.sizing import count_fetch_slots

_FIXED_BYTES = 384 << 20
"""On a GPU: workspaces of libraries, compiled kernels, captured steps, what torch rounds up."""

_ROW_BUFFERS = 16
"""Rows of the model's width a token that are alive at once beside the experts', some of them in float32."""

_LOGITS = 3
"""Of a decode step's largest batch: those that it leaves behind, the graph's own, and a copy while it is captured."""

DEFAULT_CONTEXT = 4096
"""Tokens, where nobody says how long sequences will be and the model takes as many."""


@dataclass(frozen=True)
class Demand:
    """
    Attributes:
        context: tokens of each sequence, prompt and answer.
        concurrency: sequences at once.
        prefill_tokens: of prompts that one pass takes. None: all of a sequence, but at most 2,048.
        serving: sequences come and go, as in ``serve``: their KV cache is made of blocks, and any pass of few tokens
            is a decode step. Without it, it is made of blocks where layers have windows, on a GPU.
        kv_offload_bytes: of host memory, for KV blocks that the device has given away.
        dbo: of ``serving``, whether decode batches may run as two halves at once (see ``engine.dbo``).
    """

    context: int = DEFAULT_CONTEXT
    concurrency: int = 1
    prefill_tokens: int | None = None
    serving: bool = False
    dbo: str = "off"
    kv_offload_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    @property
    def pass_tokens(self) -> int:
        """Of the largest pass."""
        return self.prefill_tokens or min(self.context, 2048)

    @property
    def bucket(self) -> int:
        """Rows of the largest decode step; more sequences than that are taken in turns."""
        return buckets_to(self.pass_tokens if self.serving else self.concurrency)[-1]

    @property
    def second_half(self) -> int:
        """Rows of the largest second half of a decode step; 0 where steps have no halves."""
        sizes = buckets_to(self.concurrency) if self.serving else ()
        return max(halvable(self.dbo, sizes), default=0) // 2


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes beside weights and expert cache.

    kv_bytes: of all sequences' KV cache. activation_bytes: of the largest pass, an estimate. decode_bytes: buffers and
    graphs of decode steps on a GPU. fixed_bytes: what a GPU's libraries take.
    """

    kv_bytes: int
    activation_bytes: int
    decode_bytes: int
    fixed_bytes: int

    @property
    def total(self) -> int:
        """Of all of them."""
        return self.kv_bytes + self.activation_bytes + self.decode_bytes + self.fixed_bytes


def working_memory(
    shape: ModelShape, demand: Demand, on_gpu: bool, config: OffloadConfig | None = None
) -> WorkingMemory:
    """
    Args:
        config: with which the model runs, if that is known: where it asks for slots for all experts none is fetched,
            and prefetched weights serve one half at a time.

    Raises:
        ConfigError: more context than the model has.
    """
    if shape.max_context is not None and demand.context > shape.max_context:
        raise ConfigError(
            f"the model's context is {shape.max_context} tokens, not {demand.context}; give a smaller context"
        )
    return WorkingMemory(
        _kv_bytes(shape, demand, on_gpu),
        _activation_bytes(shape, demand),
        _decode_bytes(shape, demand, config or OffloadConfig()) if on_gpu else 0,
        _FIXED_BYTES if on_gpu else 0,
    )


def _kv_bytes(shape: ModelShape, demand: Demand, on_gpu: bool) -> int:
    if not demand.serving and (shape.plain_cache or shape.has_states or not on_gpu):
        return demand.concurrency * shape.kv_bytes(demand.context)
    if shape.has_states:
        return shape.kv_bytes(demand.context)  # not made of blocks: one sequence at a time
    # All layers have the same blocks, those with a window too; one more is for padding.
    blocks = demand.concurrency * -(-demand.context // KV_BLOCK) + 1
    return blocks * KV_BLOCK * sum(layer.token_bytes for layer in shape.kv)


def _activation_bytes(shape: ModelShape, demand: Demand) -> int:
    """The widest layer's routed rows, rows of the rest, and logits with a copy in float32."""
    item = shape.spec.dtype.itemsize
    routed = max(
        top_k * (3 * layer.format.inter + 2 * layer.format.hidden)
        for top_k, layer in zip(shape.top_k, shape.spec.layers, strict=True)
    )
    rows = demand.pass_tokens * (routed + _ROW_BUFFERS * shape.hidden) * item
    return with_room(rows + demand.concurrency * shape.vocabulary * (item + 2 * 4))


def with_room(activation_bytes: int) -> int:
    """And an eighth more: activations come and go in different sizes, and leave gaps."""
    return activation_bytes * 9 // 8


def _decode_bytes(shape: ModelShape, demand: Demand, config: OffloadConfig) -> int:
    """Of both halves' ``DecodePath``. And logits, by far the largest of the rest."""
    logits = _LOGITS * demand.bucket * shape.vocabulary * shape.spec.dtype.itemsize
    second = 0 if weights_config(config).backend == "prefetch" else demand.second_half
    most = max(layer.num_experts for layer in shape.spec.layers)
    absent = config.cache_expert_num is None or config.cache_expert_num < most
    return sum(_path_bytes(shape, rows, absent) for rows in (demand.bucket, second) if rows) + logits


def _path_bytes(shape: ModelShape, rows: int, absent: bool) -> int:
    """Of a ``DecodePath``: fetch buffer, activations and partial sums."""
    layers = shape.spec.layers
    pairs = rows * max(shape.top_k)
    entries = min(max(layer.num_experts for layer in layers), pairs)
    largest = max(layer.format.block_bytes for layer in layers)
    inter, hidden = max(layer.format.inter for layer in layers), max(layer.format.hidden for layer in layers)
    fetch = count_fetch_slots(largest, entries) * largest if absent else 0
    return fetch + entries * rows * inter * shape.spec.dtype.itemsize + pairs * hidden * 4
