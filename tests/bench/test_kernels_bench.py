"""The kernel benchmark: what it launches is the kernels' real work, and the bytes that it counts are theirs."""

import math

import pytest
import torch
import torch.nn.functional as F

from greenroom import hardware
from greenroom.bench.kernel_cases import attention_case, fetch_case, handing_over, rms_norm_case
from greenroom.bench.kernel_experts import ExpertLaunches, noise_blocks
from greenroom.bench.kernels import bench_kernels
from greenroom.errors import ConfigError
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.experts.store import HostStore
from tests.reference.expert_math import moe_float64

pytest.importorskip("triton")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FORMAT = ExpertFormat(64, 32, torch.bfloat16, Activation(ActivationKind.SILU))


@pytest.mark.parametrize(("experts", "tokens"), [(3, 1), (8, 3)])
def test_each_set_of_experts_gives_its_own_right_sums(experts, tokens):
    blocks = noise_blocks(FORMAT, 2 * experts, DEVICE)
    FORMAT.views(blocks).up.mul_(10)
    FORMAT.views(blocks).down.mul_(10)
    launches = ExpertLaunches(FORMAT, blocks, experts, tokens, 3)
    assert launches.sets == 2
    ids = launches.ids.cpu()
    assert sorted(ids.unique().tolist()) == list(range(experts)), "every expert is used"
    assert all(len(set(row)) == 3 for row in ids.tolist()), "no token chooses an expert twice"
    up, down = launches.cases()
    sums = []
    for number in range(2):
        up.launches[number]()
        down.launches[number]()
        views = FORMAT.views(blocks[number * experts :][:experts].cpu())
        expected = moe_float64(launches.hidden.cpu(), ids, launches.weights.cpu(), views, FORMAT)
        got = launches.partial.sum(1).cpu().double()
        assert (got - expected).norm() / expected.norm() < 1e-2
        sums.append(got)
    assert not torch.equal(*sums)


def test_bytes_of_the_expert_kernels():
    blocks = noise_blocks(FORMAT, 8, DEVICE)
    up, down = ExpertLaunches(FORMAT, blocks, 8, 3, 3).cases()
    act = 3 * 3 * 32 * 2
    assert up.nbytes == 8 * 64 * 64 * 2 + 3 * 64 * 2 + act
    assert down.nbytes == 8 * 64 * 32 * 2 + act + 3 * 3 * 64 * 4
    assert (up.experts, up.tokens, up.limit) == (8, 3, "hbm")


def test_experts_that_a_batch_cannot_use_are_refused():
    blocks = noise_blocks(FORMAT, 12, DEVICE)
    for experts, tokens in ((6, 1), (2, 1), (5, 3)):
        with pytest.raises(ValueError, match="cannot use"):
            ExpertLaunches(FORMAT, blocks, experts, tokens, 3)


def test_fetch_copies_one_set_after_another():
    lock = hardware.page_locks(DEVICE.type == "cuda")
    with HostStore([FORMAT], [7], *lock) as store:
        store.blocks(0).copy_(torch.randint(256, store.blocks(0).shape, dtype=torch.uint8))
        target = torch.zeros(3, FORMAT.block_bytes, dtype=torch.uint8, device=DEVICE)
        case = fetch_case(store, 3, DEVICE, target)
        assert case.nbytes == 3 * FORMAT.block_bytes
        assert len(case.launches) == 2
        for number, launch in enumerate(case.launches):
            launch()
            assert torch.equal(target.cpu(), store.blocks(0)[3 * number :][:3])


def test_what_launches_write_to_lives_as_long_as_their_case():
    target = torch.zeros(2, FORMAT.block_bytes, dtype=torch.uint8)
    with HostStore([FORMAT], [4]) as store:
        assert fetch_case(store, 2, torch.device("cpu"), target).memory is target
        case = fetch_case(store, 2, torch.device("cpu"))
    assert case.memory.nbytes == target.nbytes


def test_norms_and_attention_are_what_they_are_called():
    norm = rms_norm_case(3, 32, DEVICE)
    assert norm.nbytes == 2 * 3 * 32 * 2 + 32 * 2
    out = norm.launches[0]()
    assert out.shape == (3, 32)
    assert not torch.equal(out, norm.launches[1]())
    attention = attention_case(2, 4, 2, 16, 80, DEVICE)
    assert attention.nbytes == 2 * 2 * 2 * 80 * 16 * 2
    launch = attention.launches[1]
    assert launch().shape == (2, 1, 4, 16)
    assert not torch.equal(launch(), attention.launches[0]())


def test_attention_reads_all_positions():
    launch = attention_case(1, 4, 2, 16, 80, DEVICE).launches[0]
    (cache,) = launch.args
    query = torch.eye(4, 16, device=DEVICE)  # any: the case's own is in the closure
    cache[0].zero_()  # all positions weigh the same, whatever is asked
    expected = cache[1].float().mean(2).repeat_interleave(len(query) // 2, dim=1)
    assert F.mse_loss(launch()[:, 0].float(), expected) < 1e-4


@pytest.mark.parametrize("tokens", [1, 2])
def test_handing_over_posts_the_whole_batch(tokens):
    with handing_over(FORMAT, 8, tokens, 3, DEVICE) as (dispatch, combine):
        dispatch.launches[0]()
        out = combine.launches[0]()
        assert out.shape == (tokens, 64)
        path = dispatch.launches[0].func.__self__
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        boxes = path.mailboxes
        # Posted, and nothing on the device: resident, streamed and CPU experts.
        assert boxes.request[0, 0] == tokens
        notes = path.record.device
        resident, streamed, on_cpu = notes.counts[0, :3].tolist()
        assert (resident, streamed) == (0, 0)
        assert 3 <= on_cpu <= 3 * tokens
        assert torch.equal(boxes.hidden[0], dispatch.launches[0].args[2].cpu())
        assert torch.equal(boxes.cpu_ids, notes.ids.cpu())


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        bench_kernels()


@pytest.mark.cuda
def test_figures_of_all_kernels():
    results = list(bench_kernels())
    names = {result.kernel for result in results}
    assert names == {"up", "down", "fetch", "rms_norm", "decode_attention", "dispatch", "combine"}
    for result in results:
        assert 0 < result.value < 1e5
        assert result.launches >= 10
        if result.bytes is None:
            assert result.kernel in ("dispatch", "combine")
            continue
        assert math.isclose(result.gb_s, result.bytes / result.value / 1e3)
        # Faster than a copy by a little at most: some kernels read more than they write.
        assert 0 < result.share < 1.3
