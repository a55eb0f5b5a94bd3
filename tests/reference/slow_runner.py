"""A BatchRunner whose logits are a pure hash of the tokens that lie in a sequence's blocks, and a KVOffload over it.

Whoever reads a block that holds something else, or writes one that somebody else reads, gets other tokens.
"""

import hashlib
import random
from functools import lru_cache

import numpy as np
import torch

from greenroom.errors import EngineError
from greenroom.kv.base import KVOffloadStats, Transfers

GARBAGE = -7


@lru_cache(maxsize=100_000)
def _values(tokens: tuple[int, ...], vocabulary: int) -> np.ndarray:
    digest = hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little")).normal(0, 3, vocabulary).astype(np.float32)


def logits_of(tokens, vocabulary: int) -> np.ndarray:
    """float32 [vocabulary] behind ``tokens``."""
    return _values(tuple(tokens), vocabulary)


class SlowRunner:
    """Blocks hold (place, token). ``fail_next`` raises in the next pass, having written nonsense."""

    def __init__(self, num_blocks=12, block_size=4, max_sequences=4, max_tokens=16, vocabulary=64) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.vocabulary = vocabulary
        self.memory = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.fail_next: Exception | None = None
        self.passes: list[list[int]] = []  # tokens of each chunk
        self.copied: list[tuple[int, int]] = []
        self.closed = 0
        self.expected_passes = 0
        self._expected: tuple | None = None

    def run(self, chunks, meanwhile=None, behind=None) -> torch.Tensor:
        assert not self.closed
        self._note_expected(chunks)
        assert 1 <= len(chunks) <= self.max_sequences
        assert sum(len(chunk.token_ids) for chunk in chunks) <= self.max_tokens
        self.passes.append([len(chunk.token_ids) for chunk in chunks])
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for chunk in chunks:
                self._write(chunk, [GARBAGE] * len(chunk.token_ids))
            raise error
        if meanwhile is not None:
            meanwhile()
        logits = self.compute(chunks)
        if behind is not None:
            behind(logits)
        return logits

    def compute(self, chunks) -> torch.Tensor:
        for chunk in chunks:
            self._write(chunk, chunk.token_ids)
        return torch.from_numpy(np.stack([logits_of(self._read(chunk), self.vocabulary) for chunk in chunks]))

    def expect(self, chunks) -> None:
        """Remembers what was said, for ``_note_expected``."""
        self._expected = chunks, [(chunk.start, [*chunk.blocks]) for chunk in chunks]

    def _note_expected(self, chunks) -> None:
        """Counts passes that were expected, and looks that they are what was said."""
        expected, self._expected = self._expected, None
        if expected is not None and expected[0] is chunks:
            self.expected_passes += 1
            assert expected[1] == [(chunk.start, [*chunk.blocks]) for chunk in chunks]
            assert all(len(chunk.token_ids) == 1 for chunk in chunks)

    def copy_block(self, source, target) -> None:
        assert source != target
        self.copied.append((source, target))
        self.memory[target] = [*self.memory[source]]

    def close(self) -> None:
        self.closed += 1

    def _write(self, chunk, tokens) -> None:
        for place, token in enumerate(tokens, chunk.start):
            self.memory[chunk.blocks[place // self.block_size]][place % self.block_size] = int(token)

    def _read(self, chunk) -> list[int]:
        length = chunk.start + len(chunk.token_ids)
        read = [self.memory[chunk.blocks[place // self.block_size]][place % self.block_size] for place in range(length)]
        assert GARBAGE not in read, "a block was read that nobody has filled"
        return read


class SlowExclusiveRunner(SlowRunner):
    """One sequence, which a chunk at 0 begins; blocks are not looked at."""

    def __init__(self, **knobs) -> None:
        super().__init__(max_sequences=1, **knobs)
        self._tokens: list[int] = []

    def run(self, chunks, meanwhile=None, behind=None) -> torch.Tensor:
        (chunk,) = chunks
        if chunk.start == 0:
            self._tokens = []
        if chunk.start != len(self._tokens):
            raise EngineError("that is another sequence")
        self.passes.append([len(chunk.token_ids)])
        if self.fail_next is not None:
            error, self.fail_next, self._tokens = self.fail_next, None, []
            raise error
        if meanwhile is not None:
            meanwhile()
        self._tokens += chunk.token_ids
        logits = torch.from_numpy(logits_of(self._tokens, self.vocabulary))[None]
        if behind is not None:
            behind(logits)
        return logits


class SlowOffload:
    """Host memory of ``room`` blocks, oldest out first. Jobs end when the test says so: in any order, or badly."""

    block_factor = 1

    def __init__(self, runner: SlowRunner, room: int) -> None:
        self.runner, self.room = runner, room
        self.kept: dict[bytes, list[int]] = {}
        self.begins: dict[bytes, tuple[bytes, list[int]]] = {}  # what each key was said to hold, and behind what
        self.jobs: dict[int, tuple] = {}
        self.ended: list[tuple[int, bool]] = []
        self.loaded_parts = 0  # what lookup_part has found
        self._part: bytes | None = None
        self.closed = 0
        self._next = 0

    def lookup(self, keys) -> int:
        count = 0
        while count < len(keys) and keys[count] in self.kept:
            count += 1
        return count

    def touch(self, keys) -> None:
        if (key := next((key for key in reversed(keys) if key in self.kept), None)) is not None:
            self.kept[key] = self.kept.pop(key)

    def lookup_part(self, after, tokens) -> tuple[bytes, int] | None:
        best = max(self.kept, key=lambda key: self._agreeing(key, after, tokens), default=None)
        count = 0 if best is None else self._agreeing(best, after, tokens)
        self._part = best if count else None
        return (best, count) if count else None

    def _agreeing(self, key, after, tokens) -> int:
        behind, held = self.begins[key]
        same = [held[:count] == [*tokens[:count]] for count in range(1, min(len(held), len(tokens)) + 1)]
        return sum(same) if behind == after else 0

    def start_load(self, keys, block_ids) -> int:
        assert len(keys) == len(block_ids) > 0
        self.loaded_parts += keys[-1] == self._part
        contents = [self.kept[key] for key in keys]
        for block in block_ids:
            self.runner.memory[block] = [GARBAGE] * self.runner.block_size
        return self._start("load", keys, block_ids, contents)

    def start_store(self, keys, block_ids, after, tokens) -> int | None:
        for key, block, before, held in zip(keys, block_ids, [after, *keys], tokens, strict=False):
            assert self.runner.memory[block][: len(held)] == [*held], "a block holds something else"
            self.begins[key] = before, [*held]
        new = [(key, block) for key, block in zip(keys, block_ids, strict=True) if key not in self.kept]
        if not new:
            return None
        contents = [[*self.runner.memory[block]] for _, block in new]
        return self._start("store", [key for key, _ in new], [block for _, block in new], contents)

    def end(self, job: int, well: bool = True) -> None:
        """Ends a job, as a stream would some time."""
        kind, keys, blocks, contents = self.jobs.pop(job)
        for key, block, content in zip(keys, blocks, contents, strict=True):
            if kind == "store":
                assert self.runner.memory[block] == content, "a block was written while it was stored"
                if well:
                    self.kept[key] = content
            else:
                assert set(self.runner.memory[block]) == {GARBAGE}, "a block was written while it was loaded"
                if well:
                    self.runner.memory[block] = [*content]
        while len(self.kept) > self.room:
            del self.kept[next(iter(self.kept))]
        self.ended.append((job, well))

    def poll(self) -> Transfers:
        ended, self.ended = self.ended, []
        return Transfers(tuple(j for j, well in ended if well), tuple(j for j, well in ended if not well))

    def wait(self, timeout_s: float) -> None:
        if not self.ended and self.jobs:
            self.end(random.choice([*self.jobs]))

    def stats(self) -> KVOffloadStats:
        return KVOffloadStats()

    def close(self) -> None:
        self.closed += 1

    def _start(self, *job) -> int:
        self._next += 1
        self.jobs[self._next] = job
        return self._next
