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

    def store(self, sequence: tuple) -> list[dict] | None:
        """The new blocks, or None; ``sequence`` starts at its first device block."""
        prefixes = [sequence[:end] for end in range(self.factor, len(sequence) + 1, self.factor)]
        present = [block for prefix in prefixes if (block := self.find(prefix))]
        new = [prefix for prefix in prefixes if self.find(prefix) is None]
        self.hold(present)
        leaving = [block for block in self.blocks if not block["users"]]
        excess = max(0, len(self.blocks) + len(new) - self.num_blocks)
        stored = None
        if excess <= len(leaving):
            for block in leaving[:excess]:
                self.blocks.remove(block)
            stored = [{"prefix": prefix, "users": 1, "ready": False} for prefix in new]
            self.blocks += stored
        self.let_go(present)
        return stored
