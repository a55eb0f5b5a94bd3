"""Which KV blocks host memory holds, told by lists and by going through everything."""


class SlowHostBlocks:
    """LRU books of host blocks. A block is [key, tokens it stands for, number, users, ready], least recent first.

    Held ones keep no place in the order: on release they go to its end.
    """

    def __init__(self, num_blocks: int, factor: int) -> None:
        self.num_blocks = num_blocks
        self.factor = factor
        self.blocks: list[dict] = []

    def find(self, prefix: tuple) -> dict | None:
        return next((block for block in self.blocks if block["prefix"] == prefix), None)

    def chain(self, first: int, sequence: tuple) -> list[dict]:
        """Ready host blocks that hold device blocks ``first`` and on of the sequence, in order."""
        found = []
        for end in range((first // self.factor + 1) * self.factor, len(sequence) + 1, self.factor):
            block = self.find(sequence[:end])
            if block is None or not block["ready"]:
                break
            found.append(block)
        return found

    def lookup(self, first: int, sequence: tuple) -> int:
        chain = self.chain(first, sequence)
        return (first // self.factor + len(chain)) * self.factor - first if chain else 0

    def to_the_end(self, block: dict) -> None:
        self.blocks.remove(block)
        self.blocks.append(block)

    def hold(self, blocks: list[dict]) -> None:
        for block in blocks:
            block["users"] += 1

    def let_go(self, blocks: list[dict]) -> None:
        for block in reversed(blocks):
            block["users"] -= 1
            if not block["users"]:
                self.to_the_end(block)

    def before(self, prefix: tuple) -> tuple:
        """The prefix that the host block before stands for."""
        return prefix[: len(prefix) - self.factor]

    def may_leave(self, sparing: tuple) -> list[dict]:
        """Blocks that nobody uses and no other follows, oldest first; ``sparing`` is about to be followed."""
        followed = {self.before(block["prefix"]) for block in self.blocks} | {sparing}
        return [block for block in self.blocks if not block["users"] and block["prefix"] not in followed]

    def new_prefixes(self, first: int, sequence: tuple) -> list[tuple]:
        """Of whole host blocks from device block ``first`` on, those that are not there."""
        ends = range(first + self.factor, len(sequence) + 1, self.factor)
        return [sequence[:end] for end in ends if self.find(sequence[:end]) is None]

    def store(self, first: int, sequence: tuple) -> list[dict] | None:
        """The new blocks, as many as there is room for, or None if for none; ``first`` begins a host block."""
        ends = range(first + self.factor, len(sequence) + 1, self.factor)
        present = [block for end in ends if (block := self.find(sequence[:end]))]
        new = self.new_prefixes(first, sequence)
        self.hold(present)
        stored: list[dict] = []
        for prefix in new:
            if len(self.blocks) == self.num_blocks:
                leaving = self.may_leave(self.before(prefix))
                if not leaving:
                    break
                self.blocks.remove(leaving[0])
            stored.append({"prefix": prefix, "users": 1, "ready": False})
            self.blocks.append(stored[-1])
        self.let_go(present)
        return stored if stored or not new else None
