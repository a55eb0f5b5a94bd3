"""TransferWorker on a CPU device: order, both directions at once, ends that are polled."""

import threading

import numpy as np
import pytest

from greenroom.kv.copies import BlockCopies, Direction
from greenroom.kv.transfer import ThreadWorker, TransferWorker

LOAD, STORE = Direction.LOAD, Direction.STORE


class Gates(BlockCopies):
    """Copies nothing: a job starts, waits for its gate and ends, or fails if told so."""

    def __init__(self) -> None:
        self.started: list[tuple[Direction, int]] = []
        self.gates = {(direction, number): threading.Event() for direction in Direction for number in range(4)}
        self.failing: set[tuple[Direction, int]] = set()

    def start(self, direction: Direction, blocks: np.ndarray, parts: np.ndarray) -> None:
        job = (direction, int(blocks[0]))
        self.started.append(job)
        assert self.gates[job].wait(30)
        if job in self.failing:
            raise RuntimeError("no")


def submit(worker: TransferWorker, direction: Direction, number: int) -> int:
    return worker.submit(direction, np.array([number, 7]), np.array([0, 1]))


def next_results(worker: TransferWorker) -> list:
    for _ in range(3):
        worker.wait(10)
        if results := worker.poll():
            return results
    return []


def test_each_direction_in_order_and_both_at_once() -> None:
    copies = Gates()
    worker = ThreadWorker(copies, block_bytes=100)
    numbers = [submit(worker, direction, job) for job in range(2) for direction in (LOAD, STORE)]
    assert numbers == [0, 1, 2, 3]
    assert worker.poll() == []
    copies.gates[STORE, 1].set()  # its turn has not come
    copies.gates[LOAD, 0].set()  # while the first store still waits
    (result,) = next_results(worker)
    assert (result.job, result.direction, result.nbytes, result.error) == (0, LOAD, 200, None)
    assert result.seconds > 0
    copies.gates[STORE, 0].set()
    ended = next_results(worker)
    ended += next_results(worker) if len(ended) < 2 else []
    assert [result.job for result in ended] == [1, 3]
    copies.gates[LOAD, 1].set()
    worker.close()
    assert [result.job for result in worker.poll()] == [2]
    assert [job for job in copies.started if job[0] is LOAD] == [(LOAD, 0), (LOAD, 1)]


def test_a_failure_is_reported_and_the_next_job_runs() -> None:
    copies = Gates()
    copies.failing.add((LOAD, 0))
    worker = ThreadWorker(copies, block_bytes=1)
    for job in range(2):
        copies.gates[LOAD, job].set()
        submit(worker, LOAD, job)
    worker.close()
    first, second = worker.poll()
    assert isinstance(first.error, RuntimeError)
    assert second.error is None


def test_wait_ends() -> None:
    copies = Gates()
    worker = ThreadWorker(copies, block_bytes=1)
    worker.wait(1000)  # nothing is under way
    submit(worker, STORE, 0)
    worker.wait(0.01)  # a job is, and does not end
    assert worker.poll() == []
    copies.gates[STORE, 0].set()
    worker.wait(1000)
    assert len(worker.poll()) == 1
    worker.close()


@pytest.mark.parametrize("direction", Direction)
def test_arrays_may_be_reused_once_a_job_is_submitted(direction: Direction) -> None:
    copies = Gates()
    worker = ThreadWorker(copies, block_bytes=1)
    blocks = np.array([0])
    worker.submit(direction, blocks, blocks)
    blocks[0] = 1
    worker.submit(direction, blocks, blocks)
    blocks[0] = 2
    for number in range(2):
        copies.gates[direction, number].set()
    worker.close()
    assert copies.started == [(direction, 0), (direction, 1)]
