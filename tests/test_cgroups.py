"""Limits of control groups, from files as the kernel writes them."""

from pathlib import Path

import pytest

from greenroom import cgroups


class Machine:
    """Control groups below ``root``, and a process in some of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "cgroup", folder / "proc"
        self.root.mkdir()
        (self.proc / "self").mkdir(parents=True)

    def write(self, group: str, **files: str) -> None:
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def enter(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    @property
    def free(self) -> int | None:
        return cgroups.free_memory(self.root, self.proc)

    @property
    def quota(self) -> float | None:
        return cgroups.cpu_quota(self.root, self.proc)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_groups_no_limits(machine):
    assert (machine.free, machine.quota) == (None, None)
    machine.enter("0::/")
    assert (machine.free, machine.quota) == (None, None)


def test_a_containers_own_group_is_the_root(machine):
    """Whatever it is called outside."""
    machine.enter("0::/../kubepods/pod1")
    machine.write(
        "../kubepods/pod1", memory__max="2", memory__current="1", cpu__max="1 100000"
    )  # somebody else's files
    machine.write("", memory__max="400000", memory__current="300000", cpu__max="250000 100000")
    assert (machine.free, machine.quota) == (100000, 2.5)


def test_page_cache_counts_as_free(machine):
    machine.write(
        "", memory__max="400000", memory__current="300000", memory__stat="anon 90000\nfile 150000\nshmem 10000"
    )
    assert machine.free == 240000, "but for what is in memory only"


def test_no_limit_is_written_as_max(machine):
    machine.write("", memory__max="max", memory__current="300000", cpu__max="max 100000")
    assert (machine.free, machine.quota) == (None, None)


def test_the_tightest_of_the_groups_around_a_process_counts(machine):
    """A job of a cluster: its scheduler limits the job, not the step's own group."""
    machine.enter("0::/slurm/job_7/step_0/task_1")
    machine.write("slurm", memory__max="9000", memory__current="1000", cpu__max="1600000 100000")
    machine.write("slurm/job_7", memory__max="5000", memory__current="900", cpu__max="400000 100000")
    machine.write("slurm/job_7/step_0", memory__max="max", memory__current="900", cpu__max="max 100000")
    machine.write("slurm/job_8", memory__max="10", memory__current="9", cpu__max="1 100000")
    assert (machine.free, machine.quota) == (4100, 4.0)


def test_version_1(machine):
    machine.enter("4:memory:/docker/a", "1:cpu,cpuacct:/docker/a", "9:name=systemd:/docker/a", "0::/")
    machine.write("memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="77")
    machine.write(
        "memory/docker/a",
        memory__limit_in_bytes="5000",
        memory__usage_in_bytes="4000",
        memory__stat="cache 1\ntotal_cache 350\ntotal_shmem 50",
    )
    machine.write("cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    machine.write("cpu/docker/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    machine.write("memory/docker/b", memory__limit_in_bytes="2", memory__usage_in_bytes="1")
    assert (machine.free, machine.quota) == (1300, 1.5)


def test_version_1_in_a_container_that_sees_its_own_group_as_the_root(machine):
    machine.enter("4:memory:/docker/0123", "1:cpu,cpuacct:/docker/0123")
    machine.write("memory", memory__limit_in_bytes="5000", memory__usage_in_bytes="4000")
    machine.write("cpu", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert (machine.free, machine.quota) == (1000, 0.5)


def test_this_machine():
    free, quota = cgroups.free_memory(), cgroups.cpu_quota()
    assert free is None or free > 0
    assert quota is None or quota > 0
