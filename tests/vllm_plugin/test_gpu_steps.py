"""Steps as vLLM makes them, one enqueued behind the other; without a GPU through Triton's interpreter."""

import time

import pytest
import torch

from greenroom import hardware
from greenroom.errors import EngineError
from greenroom.experts import mailbox
from greenroom.experts.formats import Activation, ActivationKind, ExpertFormat
from greenroom.vllm_plugin.binding import Share
from greenroom.vllm_plugin.formats import LayerFormat
from greenroom.vllm_plugin.options import MoeOffloadOptions
from greenroom.vllm_plugin.rank import RankExperts
from tests.reference.expert_math import moe_float64

pytest.importorskip("triton")

from greenroom.experts import decode_path
from greenroom.vllm_plugin import gpu_steps
from tests.experts.test_decode_path import only

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
FMT = ExpertFormat(32, 32, torch.float32, Activation(ActivationKind.SILU))
EXPERTS, TOP_K, LAYERS = 6, 2, 2


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(gpu_steps, "MAX_GRAPH_TOKENS", 4)
    experts = RankExperts(MoeOffloadOptions(cache_expert_num=3, context_num_threads=2), DEVICE, Share(0, 1, True))
    torch.manual_seed(0)
    for _ in range(LAYERS):
        _, store = experts.add_layer(LayerFormat(FMT, False), EXPERTS, TOP_K)
        views = store.views(0)
        views.up.copy_(torch.randn(views.up.shape) * 0.3)
        views.down.copy_(torch.randn(views.down.shape) * 0.3)
    experts.finish()
    yield experts
    experts.close()


@pytest.fixture
def driver(rank):
    steps = gpu_steps.GpuStepDriver(rank)
    yield steps
    steps.close()


class Model(torch.nn.Module):
    """Two layers of experts whose routing is given."""

    def __init__(self, driver):
        super().__init__()
        self.driver, self.seen = driver, []

    def forward(self, positions, hidden, ids, weights):
        for layer in range(LAYERS):
            out = self.driver.run_layer(layer, hidden, ids, weights)
            self.seen.append((layer, hidden.cpu(), ids.cpu(), weights.cpu(), out.cpu()))
            hidden = hidden + out
        return hidden


def batch(tokens):
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)]).int()
    tensors = (torch.arange(tokens), torch.randn(tokens, FMT.hidden), ids, torch.rand(tokens, TOP_K))
    return {k: t.to(DEVICE) for k, t in zip(("positions", "hidden", "ids", "weights"), tensors, strict=True)}


def call(model, driver, tokens, rows=None):
    """One step; checks every layer against float64, rows of padding excepted."""
    model.seen.clear()
    if rows is None:
        model(**batch(tokens))
    else:
        with driver.counted(rows):
            model(**batch(tokens))
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    store, real = driver.manager.store, tokens if rows is None else rows
    for layer, hidden, ids, weights, out in model.seen:
        expected = moe_float64(hidden[:real], ids[:real], weights[:real], store.views(layer), FMT)
        torch.testing.assert_close(out[:real].double(), expected, rtol=1e-4, atol=1e-5)
    assert len(model.seen) == LAYERS


def test_steps_of_every_size_agree_with_float64(driver):
    model = Model(driver)
    driver.attach(model)
    for tokens in (1, 3, 4, 9, 2, 5, 1, 4):
        call(model, driver, tokens, rows=tokens)
        driver.manager.check_invariants()
    driver.settle()
    total = driver.manager.counters.total()
    assert total.hits > 0
    assert total.admissions > 0


def test_rows_of_padding_and_steps_that_are_not_counted_leave_no_trace(driver):
    model = Model(driver)
    driver.attach(model)
    for tokens in (3, 7):
        call(model, driver, tokens)
    driver.settle()
    assert driver.manager.counters.total().to_dict() == dict.fromkeys(driver.manager.counters.total().to_dict(), 0)
    call(model, driver, 4, rows=1)
    driver.settle()
    total = driver.manager.counters.total()
    assert total.hits + total.misses == LAYERS * TOP_K


def test_a_replay_is_a_step_and_a_call_inside_it_is_not_another(driver):
    model = Model(driver)
    driver.attach(model)
    inputs = batch(2)
    with driver.counted(2):
        out = driver.run(2, lambda: model(**inputs))
    assert out.shape == (2, FMT.hidden)
    driver.settle()
    total = driver.manager.counters.total()
    chosen = len(set(inputs["ids"].flatten().tolist()))
    assert total.hits + total.misses == LAYERS * chosen


def test_the_step_behind_which_nothing_follows_is_closed(driver):
    model = Model(driver)
    driver.attach(model)
    call(model, driver, 2, rows=2)
    deadline = time.monotonic() + 20
    while driver._opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not driver._opened
    call(model, driver, 3, rows=3)


def test_a_step_that_does_not_end_is_given_up(rank, monkeypatch):
    driver = gpu_steps.GpuStepDriver(rank, watchdog_s=0.05)
    model = Model(driver)
    driver.attach(model)

    class Never:
        """Ends only once every wait has been answered."""

        def query(self):
            return False

        def synchronize(self):
            while driver._given_up is None:
                time.sleep(0.01)

    try:
        monkeypatch.setattr(driver, "mark_end", Never)
        call(model, driver, 2, rows=2)
        with pytest.raises(EngineError, match=r"given up: decode step \d+: .* within 0.05 s"):
            enqueue_two(driver)
        with pytest.raises(EngineError, match="given up"):
            driver.settle()
    finally:
        driver.close()


@pytest.mark.parametrize("how", ["next step", "close"])
def test_a_step_whose_cpu_job_does_not_end_is_given_up(rank, monkeypatch, caplog, how):
    """The main thread waits for the device, which waits for a job that has begun; the watcher frees both."""
    driver = gpu_steps.GpuStepDriver(rank, watchdog_s=1)
    boxes = driver._mailboxes
    driver._steps.split = only(0, EXPERTS)
    if DEVICE.type != "cuda":
        # As on a GPU, where work is enqueued: its end is reached once done has been raised.
        monkeypatch.setattr(decode_path, "wait_until_one", lambda word, device, limit_s: None)
        monkeypatch.setattr(driver, "mark_end", lambda: Raised(boxes.done[0, :1]))
    monkeypatch.setattr(mailbox, "LATE_JOB_S", 0.05)
    model = Model(driver)
    driver.attach(model)
    rank.engine.throttle(1e12)  # for as long as this holds
    try:
        with driver.counted(4):
            driver.run(4, lambda: driver.run_layer(0, *absent_only(driver, 4)))
        deadline = time.monotonic() + 20
        while boxes.request[0, 0]:
            assert time.monotonic() < deadline, "the job has not begun"
        if how == "next step":
            with pytest.raises(
                EngineError, match=r"given up: decode step \d+: layer 0 has not been answered within 1 s"
            ):
                enqueue_two(driver)
        driver.close()
        assert boxes.pending() == 0, "the job is not under way"
        assert driver._given_up.endswith("layer 0 has not been answered within 1 s")
        assert "job of layer 0 was given up and has not ended" in caplog.text
    finally:
        rank.engine.throttle(1)
    boxes.close()
    assert boxes.pending() is None


def enqueue_two(driver):
    """Steps of no work; at the second one the first is waited for, or the one before it."""
    for _ in range(2):
        with driver.counted(2):
            driver.run(2, lambda: None)


class Later:
    """An end that is reached when the test says so."""

    def __init__(self):
        self.reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        assert self.reached, "waited for, but not at its end"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="plays when the device ends a step")
def test_a_step_is_enqueued_while_the_one_before_runs(driver, monkeypatch):
    model, ends = Model(driver), []

    def mark_end():
        ends.append(Later())
        return ends[-1]

    driver.attach(model)
    monkeypatch.setattr(driver, "mark_end", mark_end)
    for _ in range(2):
        call(model, driver, 2, rows=2)
    assert len(driver._opened) == 2, "the first has not ended"
    with pytest.raises(AssertionError, match="not at its end"):
        call(model, driver, 2, rows=2)
    ends[0].reached = True
    call(model, driver, 3, rows=3)
    assert len(driver._opened) == 2
    for end in ends:
        end.reached = True
    call(model, driver, 1, rows=1)
    assert len(driver._opened) == 1, "ended steps are closed behind what has been enqueued"
    for _ in range(3):
        # Host-decided steps, and those that vLLM warms up with, find none under way.
        ends[-1].reached = True
        call(model, driver, 9, rows=9)
        assert not driver._opened
        call(model, driver, 4, rows=4)
    ends[-1].reached = True
    driver.settle()
    driver.manager.check_invariants()
    assert driver.manager.counters.total().hits > 0


class Raised:
    """Reached once a done word has been raised."""

    def __init__(self, done):
        self.done = done

    def query(self):
        return bool(self.done[0])

    def synchronize(self):
        while not self.query():
            time.sleep(0.01)


def absent_only(driver, tokens):
    """Inputs of a layer whose every choice is an expert without a slot."""
    absent = (driver.manager.cache.layer_map(0) < 0).nonzero()[0][:TOP_K]
    inputs = batch(tokens)
    ids = torch.tensor(absent, dtype=torch.int32, device=DEVICE).expand(tokens, TOP_K).contiguous()
    return inputs["hidden"], ids, inputs["weights"]


def test_an_error_inside_a_step_is_the_callers(driver):
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        driver.run(9, fail)
    call_model = Model(driver)
    driver.attach(call_model)
    call(call_model, driver, 2, rows=2)
    with pytest.raises(KeyError, match="mine"):
        driver.run(2, fail)
    with pytest.raises(EngineError, match="given up"):
        call(call_model, driver, 2, rows=2)


def test_page_locking_is_asked_for_beside_a_gpu_only(rank):
    assert rank.manager.store.locked == (DEVICE.type == "cuda")
    assert hardware.memlock_limit()
