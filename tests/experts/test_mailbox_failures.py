"""What goes wrong behind a mailbox: the device goes on, and the caller hears of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from greenroom.errors import EngineError
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore
from tests.experts.stage import EXPERTS, SMALL, WIDE, Stage

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class StoreWithoutExpert(HostStore):
    """Its layer 1 lacks expert 2."""

    def addresses(self, layer: int) -> np.ndarray:
        addresses = super().addresses(layer)
        if layer == 1:
            addresses[2] = 0
        return addresses


def test_a_failure_raises_done_and_reaches_the_caller() -> None:
    with Stage([], store=StoreWithoutExpert([SMALL] * 3, [EXPERTS] * 3)) as stage:
        boxes, device = stage.boxes, stage.device
        boxes.arm()
        hidden, ids, weights = stage.batch(1, 2, 0)
        for _ in range(3):
            device.write(1, hidden, torch.full_like(ids, 2), weights)
            device.request(1, 2)
            device.wait(1)
            with pytest.raises(EngineError, match="layer 1: expert 2 was chosen but has no block"):
                boxes.raise_failure()
            boxes.raise_failure()
            # Its neighbours and itself go on.
            for layer in (0, 1):
                batch = (hidden, torch.full_like(ids, 3), weights)
                device.write(layer, *batch)
                device.request(layer, 2)
                assert torch.equal(device.result(layer)[:2], stage.submitted(layer, batch))
        boxes.raise_failure()


@pytest.mark.parametrize("row", [0, 16, 33, -32, 256, 2**31 - 1])
def test_an_impossible_division_is_a_failure(row: int) -> None:
    with Stage([SMALL, WIDE]) as stage:
        boxes, device = stage.boxes, stage.device
        boxes.arm()
        batch = stage.batch(1, 2, 0)
        device.write(1, *batch)
        device.divide(1, 3, row)
        device.request(1, 2)
        assert device.result(1).isnan().all()
        with pytest.raises(EngineError, match=f"layer 1: expert 3 cannot be divided at row {row} of .* width 256"):
            boxes.raise_failure()
        device.divide(1, -1, row)
        device.request(1, 2)
        assert torch.equal(device.result(1)[:2], stage.submitted(1, batch))
        boxes.raise_failure()


@pytest.mark.parametrize("rows", [5, 2**31 - 1, -1])
def test_more_rows_than_there_is_room_for(rows: int) -> None:
    with Stage([SMALL, SMALL], max_tokens=4) as stage:
        stage.boxes.arm()
        stage.device.write(0, *stage.batch(0, 4, 0))
        stage.device.request(0, rows)
        assert stage.device.result(0).isnan().all()
        stage.post(1, 4)
        stage.device.wait(1)
        with pytest.raises(EngineError, match=f"layer 0: a device asked for {rows % 2**32} rows .* holds 4"):
            stage.boxes.raise_failure()


def test_the_first_of_several_failures_is_kept() -> None:
    with Stage([SMALL, SMALL]) as stage:
        stage.boxes.arm()
        for layer in (1, 0):
            stage.device.request(layer, 100 + layer)
            stage.device.wait(layer)
        with pytest.raises(EngineError, match="layer 1: a device asked for 101 rows"):
            stage.boxes.raise_failure()
        stage.boxes.raise_failure()


_OUT_OF_MEMORY = """
import resource
import torch
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.mailbox import Mailboxes
from greenroom.experts.store import HostStore
from tests.reference.posting_device import PostingDevice

store = HostStore([ExpertFormat(16, 65536, torch.bfloat16, Activation(ActivationKind.SILU))], [1])
with CpuExperts(2) as engine:
    boxes = Mailboxes(engine, store, 64, 1000, pin_memory=False)
    boxes.arm()
    device = PostingDevice(boxes)
    boxes.cpu_ids[0, 1:, 1:] = -1
    boxes.cpu_ids[0, 0, 1:] = -1
    device.request(0, 1)
    device.wait(0)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    boxes.cpu_ids.zero_()  # 8 GiB of activation rows
    device.request(0, 64)
    device.wait(0)
    try:
        boxes.raise_failure()
    except Exception as error:
        print(type(error).__name__, error)
    boxes.cpu_ids[0, 0, 1:] = -1
    device.request(0, 1)
    device.wait(0)
    boxes.raise_failure()
    print("still runs")
"""


def test_no_memory_for_a_request_is_a_failure_and_no_end() -> None:
    """In a process whose memory is limited: how much another may take depends on the machine."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", _OUT_OF_MEMORY], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EngineError layer 0: the CPU engine could not get memory" in done.stdout
    assert "still runs" in done.stdout


def test_layers_are_checked_once_at_the_beginning() -> None:
    ungated = ExpertFormat(16, 8, torch.float32, Activation(ActivationKind.SWIGLU_OAI), gated=False)
    with HostStore([SMALL, ungated], [2, 2]) as store, CpuExperts(1) as engine:
        with pytest.raises(EngineError, match="needs experts with a gate"):
            Mailboxes(engine, store, 4, 3, pin_memory=False)
        with HostStore([SMALL], [2]) as good, pytest.raises(EngineError, match="at least one row"):
            Mailboxes(engine, good, 0, 3, pin_memory=False)
