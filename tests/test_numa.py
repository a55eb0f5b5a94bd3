"""NUMA nodes as the system lists them; memory that is first written where it is wanted."""

import mmap
import os

import pytest
import torch

from greenroom import hardware, numa
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore

FORMAT = ExpertFormat(512, 512, torch.bfloat16, Activation(ActivationKind.SILU))


def test_what_the_system_says(tmp_path):
    for node, text in ((0, "0-2,8\n"), (1, "3\n"), (3, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    assert numa.node_cores(tmp_path) == [[0, 1, 2, 8], [3], [], []]
    assert numa.node_cores(tmp_path / "nothing") == []


def test_homes_are_the_nodes_of_the_cores_in_use():
    nodes = [[0, 1, 2, 3], [], [4, 5, 6, 7]]
    assert numa.homes([6, 1, 4], nodes) == [[1], [4, 6]]
    assert numa.homes([5], nodes) == [[5]]
    assert numa.homes([9], nodes) == []


@pytest.mark.parametrize("nodes", [[], [[0, 1]], [[0, 1], []]])
def test_one_node_is_no_choice(nodes):
    assert numa.homes([0, 1], nodes) == []


class Pages:
    """Stands for memory; notes which page is written by a thread on which cores."""

    def __init__(self, size: int) -> None:
        self.size, self.writer = size, {}

    def numpy(self) -> "Pages":
        return self

    def __len__(self) -> int:
        return self.size

    def __setitem__(self, pages: slice, value: int) -> None:
        assert value == 0
        for byte in range(*pages.indices(self.size)):
            assert byte not in self.writer, "no page twice"
            self.writer[byte] = os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("size", [1, numa.STRETCH, 5 * numa.STRETCH + 3 * mmap.PAGESIZE])
def test_pages_are_written_in_turns_from_each_nodes_cores(size):
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    pages = Pages(size)
    numa.place(pages, [[first], [second]])
    assert sorted(pages.writer) == [*range(0, size, mmap.PAGESIZE)], "every page"
    for byte, cores in pages.writer.items():
        assert cores == {(first, second)[byte // numa.STRETCH % 2]}
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_may_not_move_writes_them_all(monkeypatch):
    def refuse(pid, cores):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    pages = Pages(3 * numa.STRETCH)
    numa.place(pages, [[0], [1]])
    assert len(pages.writer) == 3 * numa.STRETCH // mmap.PAGESIZE


def test_an_error_leaves_the_thread_where_it_was():
    before = os.sched_getaffinity(0)

    class Broken(Pages):
        def __setitem__(self, pages: slice, value: int) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        numa.place(Broken(9), [[min(before)]])
    assert os.sched_getaffinity(0) == before


def resident_pages(address: int, size: int) -> int:
    """Pages of a mapping that exist, by the kernel's own count."""
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(address // mmap.PAGESIZE * 8)
        entries = table.read(size // mmap.PAGESIZE * 8)
    return sum(entries[at + 7] >> 7 for at in range(0, len(entries), 8))


def test_a_store_exists_before_it_is_filled():
    homes = [[core] for core in sorted(os.sched_getaffinity(0))[:2]]
    for given, exists in ((homes, True), ((), False)):
        with HostStore([FORMAT], [3], homes=given) as store:
            size = store.nbytes // hardware.HUGE_PAGE * hardware.HUGE_PAGE
            assert (resident_pages(int(store.addresses(0)[0]), size) == size // mmap.PAGESIZE) is exists
            assert not store.blocks(0).any()
