"""A request as the scheduler sees it: tokens, and blocks for their keys and values."""

from array import array
from dataclasses import dataclass, field

from greenroom.kv.prefix import START, BlockKey


def no_blocks() -> "array[int]":
    """An empty ``Sequence.blocks``."""
    return array("q")


@dataclass(eq=False)
class Sequence:
    """Prompt and output of one request, and how far the model has come. The scheduler alone writes it.

    Attributes:
        order: of arrival. Lower ones go first, higher ones give up their blocks first.
        tokens: prompt and output so far.
        prompt_tokens: length of the prompt.
        computed: tokens whose keys and values are in ``blocks``.
        blocks: KV blocks, in order, int64; the sequence has a reference to each. An array, since every pass copies it.
        keys: names of the first full blocks of ``tokens``.
        registered: of ``blocks``, those at the front that have been registered or found under their keys.
        cached_tokens: of the prompt, those that others had computed, up to its first preemption; None before it was
            admitted.
        preempted: it has given up its blocks; what it finds from then on may be its own.
    """

    order: int
    tokens: list[int]
    prompt_tokens: int = 0
    computed: int = 0
    blocks: "array[int]" = field(default_factory=no_blocks)
    keys: list[BlockKey] = field(default_factory=list)
    registered: int = 0
    cached_tokens: int | None = None
    preempted: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def last_key(self) -> BlockKey:
        """Of the last block that is registered."""
        return self.keys[self.registered - 1] if self.registered else START

    @property
    def pending(self) -> int:
        """Tokens that the model must still see before it can choose another one."""
        return len(self.tokens) - self.computed
