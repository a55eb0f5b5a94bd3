"""Mailboxes of the CPU engine: what a device posts is computed, and nothing but that."""

import math
import random

import pytest
import torch

from greenroom.experts.formats import ExpertFormat
from greenroom.experts.native import Isa, supported_isas
from tests.experts.stage import EXPERTS, SILU, SLOW, SMALL, WIDE, Stage

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.label)
def test_random_requests(isa: Isa, threads: int) -> None:
    """Any order of layers, one or two outstanding at once, any number of rows up to the most, some with a divided
    expert."""
    dice = random.Random(f"{isa}{threads}")
    for _ in range(6):
        formats = [
            ExpertFormat(
                dice.choice([1, 33, 64, 130]),
                dice.choice([1, 17, 32, 65, 130]),
                dice.choice([torch.bfloat16, torch.float16, torch.float32]),
                SILU,
                gated=dice.random() < 0.7,
                bias=dice.random() < 0.5,
            )
            for _ in range(dice.randint(2, 4))
        ]
        most = dice.choice([1, 4, 19])
        with Stage(formats, threads, isa, max_tokens=most, top_k=dice.randint(1, 5)) as stage:
            stage.boxes.arm()
            for _ in range(10):
                layers = dice.sample(range(len(formats)), dice.randint(1, 2))
                batches = {layer: stage.batch(layer, dice.randint(1, most), dice.getrandbits(30)) for layer in layers}
                divided = {}
                for layer, batch in batches.items():
                    parts = (formats[layer].inter - 1) // 32
                    if parts and dice.random() < 0.7:
                        divided[layer] = (dice.randrange(EXPERTS), 32 * dice.randint(1, parts))
                    else:
                        divided[layer] = (-1, 0)
                    stage.device.write(layer, *batch)
                    stage.device.divide(layer, *divided[layer])
                for layer, batch in batches.items():
                    stage.device.request(layer, len(batch[0]))
                dice.shuffle(layers)
                for layer in layers:
                    rows = len(batches[layer][0])
                    out = stage.device.result(layer)
                    assert out[rows:].isnan().all(), "rows that were not posted were written"
                    fmt = formats[layer]
                    want = stage.expected(layer, batches[layer], divided[layer])
                    tolerance = 2e-2 if fmt.dtype is torch.bfloat16 else 1e-4
                    torch.testing.assert_close(out[:rows].double(), want, rtol=tolerance, atol=tolerance)
                    assert torch.equal(out[:rows], stage.submitted(layer, batches[layer], divided[layer]))
            assert stage.boxes.pending() is None
            stage.boxes.raise_failure()


def test_memory_is_as_documented() -> None:
    with Stage([SMALL, WIDE], max_tokens=6, top_k=3) as stage:
        boxes = stage.boxes
        words = {boxes.request: torch.int32, boxes.done: torch.int32, boxes.busy_ns: torch.int64}
        for word, dtype in words.items():
            assert word.dtype is dtype
            assert word.stride(0) * word.itemsize == 64
            assert word.data_ptr() % 64 == 0
        for choices in (boxes.cpu_ids, boxes.weights):
            assert choices.shape == (2, 6, 3)
        assert [tuple(hidden.shape) for hidden in boxes.hidden] == [(6, 33), (6, 512)]
        assert [tuple(out.shape) for out in boxes.out] == [(6, 33), (6, 512)]
        assert boxes.request.tolist() == [[0, -1] + [0] * 14] * 2
        for tensor in (boxes.done, boxes.busy_ns, boxes.cpu_ids, boxes.weights, *boxes.hidden, *boxes.out):
            assert not tensor.any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_two_thousand_quick_requests(threads: int) -> None:
    with Stage([SMALL] * 7, threads) as stage:
        device, layers = stage.device, 7
        batches = [stage.batch(layer, 2, layer) for layer in range(layers)]
        expected = [stage.submitted(layer, batch) for layer, batch in enumerate(batches)]
        for layer, batch in enumerate(batches):
            device.write(layer, *batch)
        stage.boxes.arm()
        for i in range(2000):
            layer = i * 3 % layers
            device.request(layer, 2)
            device.wait(layer)
            if i % 50 < layers:  # of every layer in turn
                assert torch.equal(stage.boxes.out[layer][:2], expected[layer])
                stage.boxes.out[layer].fill_(math.nan)


def test_a_request_is_cleared_before_its_job_starts() -> None:
    """Cleared after done it could be the next one."""
    with Stage([WIDE, SLOW]) as stage:
        stage.slow_down(1, 0.2)
        stage.boxes.arm()
        stage.post(1)
        stage.device.wait_until_begun(1)
        assert not stage.device.answered(1), "the request was cleared when the job was over"
        assert stage.boxes.pending() == 1
        assert stage.boxes.out[1].isnan().any()
        stage.device.wait(1)
        assert stage.boxes.pending() is None


def test_words_behind_a_divided_expert_are_not_read() -> None:
    with Stage([WIDE]) as stage:
        stage.boxes.arm()
        batch = stage.batch(0, 2, 0)
        stage.device.write(0, *batch)
        stage.boxes.request[0, 3:] = 10**9
        stage.device.request(0, 2)
        assert torch.equal(stage.device.result(0)[:2], stage.submitted(0, batch))
        stage.boxes.raise_failure()
