"""Streams routed experts from a checkpoint into the host store.

What the file stores as the store wants it goes from the page cache into the store's memory in one copy.
Everything else (another dtype, transposed, interleaved) passes, some rows at a time, through a small buffer
that each thread has.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from greenroom.engine.checkpoint import Checkpoint, TensorEntry
from greenroom.engine.expert_keys import ExpertPiece, ExpertPlacements, Part
from greenroom.engine.progress import Progress
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.errors import CheckpointError, UnsupportedModelError
from greenroom.experts.formats import SUPPORTED_DTYPES, ExpertFormat
from greenroom.experts.store import HostStore

SCRATCH_BYTES = 4 << 20
"""What a thread reads before it converts: still in the core's cache then, and no share of any model."""
_BLOCK_ROWS = 64
"""Rows of a chunk come in multiples of this, which fills whole cache lines of a transposed target."""
_TILE = 1 << 15
"""Elements of one copy. Above it torch brings in its own threads, which only get in these threads' way."""


@dataclass(frozen=True)
class ExpertRead:
    """One expert's share of a checkpoint tensor: ``nbytes`` from byte ``skip`` of ``entry`` on."""

    entry: TensorEntry
    piece: ExpertPiece
    expert: int
    skip: int
    nbytes: int


def read_experts(
    checkpoint: Checkpoint,
    placements: ExpertPlacements,
    spec: ModelSpec,
    store: HostStore,
    progress: Progress | None = None,
    threads: int = 4,
) -> None:
    """Fills ``store`` (layer by layer as in ``spec.layers``) and returns when every byte is in it.

    Args:
        progress: called from this thread, with bytes that never fall and end at the total.
        threads: readers. Each takes the next piece in the order of the files.

    Raises:
        CheckpointError: a tensor of the wrong shape (before anything is read), an unreadable file. All
            readers have stopped by then; the store's content is undefined.
        UnsupportedModelError: a tensor's dtype cannot be converted.
    """
    reads = plan_reads(checkpoint, placements, spec)
    total = sum(read.nbytes for read in reads)
    crew = _Crew(reads, lambda read, scratch: _read(checkpoint, read, spec, store, scratch))
    done = 0

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    crew.run(max(1, min(threads, len(reads))), report)


def plan_reads(checkpoint: Checkpoint, placements: ExpertPlacements, spec: ModelSpec) -> list[ExpertRead]:
    """The reads that ``placements`` asks for, by file and position in it, their shapes checked.

    Raises:
        CheckpointError: a tensor has another shape than the model's.
        UnsupportedModelError: a tensor's dtype cannot be converted.
    """
    reads = []
    for piece in placements:
        entry, layer = checkpoint.tensors[piece.name], spec.layers[piece.layer]
        _check(entry, piece, layer)
        if piece.expert is not None:
            reads.append(ExpertRead(entry, piece, piece.expert, 0, entry.nbytes))
            continue
        share = entry.nbytes // layer.num_experts
        reads += [ExpertRead(entry, piece, e, e * share, share) for e in range(layer.num_experts)]
    return sorted(reads, key=lambda read: (read.entry.file, read.entry.offset + read.skip))


def stored_shape(piece: ExpertPiece, fmt: ExpertFormat) -> tuple[int, ...]:
    """Shape of one expert's share of ``piece`` in the checkpoint."""
    rows = fmt.inter * (2 if piece.part in (Part.GATE_UP, Part.GATE_UP_BIAS) else 1)
    match piece.part:
        case Part.DOWN:
            shape: tuple[int, ...] = (fmt.hidden, fmt.inter)
        case Part.DOWN_BIAS:
            shape = (fmt.hidden,)
        case Part.GATE_BIAS | Part.UP_BIAS | Part.GATE_UP_BIAS:
            shape = (rows,)
        case _:
            shape = (rows, fmt.hidden)
    return shape[::-1] if piece.transposed else shape


def _check(entry: TensorEntry, piece: ExpertPiece, layer: ExpertLayerSpec) -> None:
    shape = stored_shape(piece, layer.format)
    expected = shape if piece.expert is not None else (layer.num_experts, *shape)
    if entry.shape != expected:
        raise CheckpointError(
            f"{entry.file}: tensor '{entry.name}' has shape {list(entry.shape)}, "
            f"but the model's configuration asks for {list(expected)}"
        )
    if entry.dtype not in SUPPORTED_DTYPES:
        raise UnsupportedModelError(f"tensor '{entry.name}' has dtype {entry.dtype}; use BF16, FP16 or FP32")


def _read(checkpoint: Checkpoint, read: ExpertRead, spec: ModelSpec, store: HostStore, scratch: "_Scratch") -> None:
    piece, fmt = read.piece, spec.layers[read.piece.layer].format
    target = _destination(store, read, fmt)
    if read.entry.dtype == fmt.dtype and not piece.transposed and not piece.interleaved:
        checkpoint.read_into(read.entry, target, read.skip)
        return
    assert isinstance(read.entry.dtype, torch.dtype)
    shape = stored_shape(piece, fmt)
    rows, columns = shape if len(shape) == 2 else (shape[0], 1)
    pitch = read.nbytes // rows
    step = max(1, SCRATCH_BYTES // (pitch * _BLOCK_ROWS)) * _BLOCK_ROWS
    target = target.view(-1, 1) if len(shape) == 1 else target
    for first in range(0, rows, step):
        count = min(step, rows - first)
        source = scratch.take(count * pitch).view(read.entry.dtype).view(count, columns)
        checkpoint.read_into(read.entry, source, read.skip + first * pitch)
        convert_rows(target, source, first, piece)


def convert_rows(target: torch.Tensor, source: torch.Tensor, first: int, piece: ExpertPiece) -> None:
    """Writes rows ``first``... of the stored matrix to where they belong in the store.

    Args:
        target: the part's rows in the store, [out, in].
        source: some rows as the checkpoint has them: [n, in], or [n, out] when transposed.
        first: number of the first of them; even when gate and up rows alternate.
    """
    streams = 2 if piece.interleaved else 1
    for number, part in enumerate(target.chunk(streams)):
        if piece.transposed:
            _copy_tiled(part[:, first : first + len(source)], source[:, number::streams].t(), _BLOCK_ROWS)
        else:
            rows = source[number::streams]
            _copy_tiled(part[first // streams :][: len(rows)], rows, rows.shape[1])


def _copy_tiled(target: torch.Tensor, source: torch.Tensor, width: int) -> None:
    """``target.copy_(source)`` of [m, n] in tiles of ``width`` columns, each small enough for the cache."""
    height = max(1, _TILE // width)
    for top in range(0, target.shape[0], height):
        for left in range(0, target.shape[1], width):
            tile = slice(top, top + height), slice(left, left + width)
            target[tile].copy_(source[tile])


def _destination(store: HostStore, read: ExpertRead, fmt: ExpertFormat) -> torch.Tensor:
    """The rows of the store that ``read`` fills; contiguous."""
    views = store.views(read.piece.layer)
    match read.piece.part:
        case Part.DOWN:
            return views.down[read.expert]
        case Part.DOWN_BIAS:
            assert views.down_bias is not None
            return views.down_bias[read.expert]
        case Part.GATE_BIAS | Part.UP_BIAS | Part.GATE_UP_BIAS:
            assert views.up_bias is not None
            up = views.up_bias[read.expert]
        case _:
            up = views.up[read.expert]
    if read.piece.part in (Part.GATE, Part.GATE_BIAS):
        return up[: fmt.inter]
    if read.piece.part in (Part.UP, Part.UP_BIAS):
        return up[up.shape[0] - fmt.inter :]
    return up


class _Scratch:
    """One thread's buffer; grows to the largest chunk that it was asked for."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]


class _Crew:
    """Threads that work through ``reads`` in order, and all stop when one of them or the caller fails."""

    def __init__(self, reads: list[ExpertRead], work: Callable[[ExpertRead, _Scratch], None]) -> None:
        self._reads = deque(reads)
        self._work = work
        self._stop = threading.Event()
        self._results: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def run(self, threads: int, report: Callable[[int], None]) -> None:
        """Returns when all reads are done; ``report`` gets each one's bytes, in this thread.

        Raises whatever the first failing read or ``report`` raised, after every thread has ended.
        """
        workers = [threading.Thread(target=self._worker, name=f"read-experts-{n}") for n in range(threads)]
        started = 0
        try:
            for worker in workers:
                worker.start()
                started += 1
            running = started
            while running:
                result = self._results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                else:
                    report(result)
        finally:
            self._stop.set()
            for worker in workers[:started]:
                worker.join()

    def _worker(self) -> None:
        scratch = _Scratch()
        try:
            while not self._stop.is_set() and self._reads:
                try:
                    read = self._reads.popleft()
                except IndexError:  # another thread took the last one
                    break
                self._work(read, scratch)
                self._results.put(read.nbytes)
        except BaseException as error:
            self._stop.set()
            self._results.put(error)
        finally:
            self._results.put(None)
