"""Prefetch: no layer computes with another's bytes, whatever the numbers, the order of passes and their failures."""

import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from greenroom.errors import ConfigError, EngineError
from greenroom.weights.config import WeightOffloadConfig
from greenroom.weights.prefetch import PrefetchOffload
from greenroom.weights.select import select, weights_of
from tests.weights.late_copies import LateCopies

WIDTH = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 4)
        self.o_proj = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.o_proj(self.q_proj(x).tanh())


class Layer(nn.Module):
    """Every third layer is wider than the others, so that slots hold units of different sizes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inner = 5 if index % 3 else 9
        self.self_attn = Attention()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x + self.self_attn(x)
        return x * self.scale + self.down(self.up(x).relu())


class Decoder(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(count))
        self.stop_after: int | None = None
        self.fail_at: int | None = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == self.fail_at:
                raise ValueError("no luck")
            x = layer(x)
            if index == self.stop_after:
                break
        return x


class Model(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(count)
        self.model = Decoder(count)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.model(x))


def offload(model: Model, copies: LateCopies | None = None, **settings) -> PrefetchOffload:
    """Copies in as many pieces as there are layers for them, however small those get."""
    config = WeightOffloadConfig("prefetch", **settings)
    offloader = PrefetchOffload(select(weights_of(model), "model", config), torch.device("cpu"), copies, least_piece=1)
    offloader.take(model)
    offloader.attach(model, model.model)
    offloader.check()
    return offloader


def pair(count: int) -> tuple[Model, Model]:
    """Two models with the same weights."""
    stock, model = Model(count), Model(count)
    model.load_state_dict(stock.state_dict())
    return stock, model


@pytest.mark.parametrize("params", [None, "self_attn", "q_proj", "up|down|scale"])
@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("count", "group", "number"),
    [(1, 1, 1), *((count, *rule) for count in (4, 7) for rule in ((1, 1), (2, 1), (3, 2), (4, 3)))],
)
@torch.no_grad()
def test_every_pass_computes_with_its_own_weights(count, group, number, step, params):
    stock, model = pair(count)
    copies = LateCopies()
    offloader = offload(model, copies, group_size=group, num_in_group=number, prefetch_step=step, params=params)
    names = [unit.layer for unit in offloader.selection.units]
    assert names == [layer for layer in range(count) if layer % group >= group - number]
    for seed in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(model(x), stock(x))
        assert copies.idle
        offloader.check()
    offloader.close()


@torch.no_grad()
def test_bytes_copied_in_a_pass():
    """Each unit once, but for those that have a slot to themselves."""
    for units, step, copied in [(4, 1, 4), (4, 2, 4), (5, 2, 5), (5, 3, 4), (5, 4, 2), (5, 5, 0), (5, 9, 0), (1, 1, 0)]:
        _, model = pair(units)
        copies = LateCopies()
        offload(model, copies, prefetch_step=step)
        copies.log.clear()
        model(torch.ones(1, WIDTH))
        assert [kind for kind, _ in copies.log].count("start") == copied, (units, step)


@torch.no_grad()
def test_bytes_copied_are_those_that_the_selection_announces():
    for units, step in [(5, 2), (5, 3), (7, 4), (4, 4), (6, 9)]:
        _, model = pair(units)
        copies = LateCopies()
        offloader = offload(model, copies, prefetch_step=step)
        copies.started = 0
        model(torch.ones(1, WIDTH))
        assert copies.started == offloader.selection.pass_bytes


@torch.no_grad()
def test_a_copy_starts_as_early_as_its_slot_is_free():
    """``prefetch_step`` units ahead, behind the part of the layer that reads the slot, not behind the whole layer."""
    _, model = pair(6)
    copies = LateCopies()
    offload(model, copies, prefetch_step=2, params="self_attn")
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=index: copies.log.append(("attended", i)))
        layer.up.register_forward_pre_hook(lambda *_, i=index: copies.log.append(("up", i)))
    copies.log.clear()
    model(torch.ones(1, WIDTH))
    for index in range(6):
        where = copies.log.index(("attended", index))
        assert copies.log[where - 1] == ("start", index % 2)
        assert copies.log[where + 1] == ("up", index)


@torch.no_grad()
def test_pieces_start_layer_by_layer():
    """Every third of nine layers: three pieces from unit to unit, and the first unit's before its turn."""
    stock, model = pair(9)
    copies = LateCopies()
    offload(model, copies, group_size=3, params="self_attn")
    for index, layer in enumerate(model.model.layers):
        layer.up.register_forward_hook(lambda *_, i=index: copies.log.append(("experts", i)))
    copies.log.clear()
    x = torch.randn(1, WIDTH)
    assert torch.equal(model(x), stock(x))
    experts = [copies.log.index(("experts", index)) for index in range(9)]
    started = [copies.log[before + 1 : after].count(("start", 0)) for before, after in pairwise([-1, *experts])]
    assert started == [1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert copies.log.count(("wait", 0)) == 3


@torch.no_grad()
def test_layers_that_do_not_run_only_delay_their_pieces():
    """A model may skip layers (early exit, layer drop); what they would have started is started where it is needed."""
    stock, model = pair(9)
    offloader = offload(model, LateCopies(), group_size=3)
    x = torch.randn(1, WIDTH)
    expected = stock(x)
    for index in (1, 4, 6):
        for twin in (stock, model):
            twin.model.layers[index] = nn.Identity()
    skipped = stock(x)
    assert not torch.equal(skipped, expected)
    for _ in range(2):
        assert torch.equal(model(x), skipped)
        offloader.check()


GROUPS = [{"group_size": 1}, {"group_size": 3}, {"group_size": 2, "params": "self_attn"}]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("fail_at", range(6))
@torch.no_grad()
def test_the_pass_behind_a_failed_one_starts_clean(fail_at, step, group):
    stock, model = pair(5)
    offloader = offload(model, LateCopies(), prefetch_step=step, **group)
    x = torch.randn(1, WIDTH)
    model.model.fail_at = fail_at
    if fail_at < 5:
        with pytest.raises(ValueError, match="no luck"):
            model(x)
    offloader.check()
    model.model.fail_at = None
    assert torch.equal(model(x), stock(x))
    offloader.check()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("layer", range(5))
@torch.no_grad()
def test_the_pass_behind_an_interrupted_one_starts_clean(layer, group):
    stock, model = pair(5)
    offloader = offload(model, LateCopies(), prefetch_step=2, **group)
    x, interrupted = torch.randn(1, WIDTH), model.model.layers[layer].up
    handle = interrupted.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(x)
    handle.remove()
    assert torch.equal(model(x), stock(x))
    offloader.check()


@torch.no_grad()
def test_two_threads_cannot_run_at_once():
    stock, model = pair(4)
    offloader = offload(model, LateCopies(), prefetch_step=2)
    x, refused = torch.randn(1, WIDTH), []

    def intrude(*_):
        thread = threading.Thread(target=lambda: refused.append(run_refused(model, x)))
        thread.start()
        thread.join()

    handle = model.model.layers[2].register_forward_pre_hook(intrude)
    assert torch.equal(model(x), stock(x)), "the first one goes on undisturbed"
    assert "another pass of this model is running" in refused[0]
    handle.remove()
    offloader.check()


def run_refused(model: nn.Module, x: torch.Tensor) -> str:
    with pytest.raises(EngineError) as error:
        model(x)
    return str(error.value)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("fail_at", range(5))
@torch.no_grad()
def test_a_failed_capture_moved_nothing(fail_at, group):
    """What a capture records is not done: neither the copies nor their waits."""
    stock, model = pair(5)
    copies = LateCopies()
    offloader = offload(model, copies, prefetch_step=2, **group)
    x = torch.randn(1, WIDTH)
    copies.start, copies.wait, copies.capturing = (lambda *_: None), (lambda *_: None), True
    model.model.fail_at = fail_at
    with pytest.raises(ValueError, match="no luck"):
        model(x)
    del copies.start, copies.wait
    copies.capturing, model.model.fail_at = False, None
    offloader.check()
    assert torch.equal(model(x), stock(x))


@pytest.mark.parametrize("group", GROUPS)
@torch.no_grad()
def test_a_pass_that_ends_early_leaves_the_next_one_its_weights(group):
    stock, model = pair(7)
    offloader = offload(model, LateCopies(), prefetch_step=3, **group)
    x = torch.randn(1, WIDTH)
    for stop_after in (0, 2, 5, None, 3, None):
        stock.model.stop_after = model.model.stop_after = stop_after
        assert torch.equal(model(x), stock(x))
        offloader.check()


@torch.no_grad()
def test_a_compiled_model():
    """Its graph breaks around copies, so none moves across what it computes."""
    stock, model = pair(5)
    offloader = offload(model, LateCopies(), prefetch_step=2)
    compiled = torch.compile(model, backend="eager")
    for seed in range(3):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled(x), stock(x))
        offloader.check()


@torch.no_grad()
def test_a_layer_out_of_turn_is_refused():
    _, model = pair(4)
    offload(model)
    with pytest.raises(EngineError, match=r"'model\.layers\.2' ran out of turn"):
        model.model.layers[2](torch.ones(1, WIDTH))
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]
    with pytest.raises(EngineError, match=r"'model\.layers\.1' ran out of turn"):
        model(torch.ones(1, WIDTH))


@torch.no_grad()
def test_weights_that_were_moved_are_noticed():
    _, model = pair(4)
    offload(model)
    model.double()
    with pytest.raises(EngineError, match=r"'model\.layers\.0' were moved or converted"):
        model(torch.ones(1, WIDTH, dtype=torch.float64))


def test_its_state_cannot_be_saved():
    """What the parameters hold is another layer's, for most of them."""
    _, model = pair(4)
    offloader = offload(model, group_size=2, prefetch_step=1)
    with pytest.raises(ConfigError, match=r"'model\.layers\.1' has prefetched weights"):
        model.state_dict()
    offloader.close()
    assert len(model.state_dict()) == len(list(model.parameters()))


@torch.no_grad()
def test_closed():
    _, model = pair(4)
    offloader = offload(model, prefetch_step=2)
    offloader.close()
    offloader.close()
    assert all(parameter.numel() == 0 for parameter in model.model.parameters())
    assert not model.model._forward_hooks
    assert not model.model.layers[0]._forward_pre_hooks
    assert model.head.weight.numel() > 0


class Codes(nn.Module):
    """Reads an integer and a number without dimensions, as quantised layers do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(index, index + WIDTH).to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0 + index))

    def forward(self, x):
        return x + self.codes * self.scale


@torch.no_grad()
def test_integers_and_odd_sizes_are_bytes_like_others():
    stock, model = pair(4)
    for twin in (stock, model):
        for index, layer in enumerate(twin.model.layers):
            layer.self_attn = Codes(index)
    offload(model, LateCopies(), prefetch_step=1)
    x = torch.ones(1, WIDTH)
    assert torch.equal(model(x), stock(x))


_AFTER = PrefetchOffload.after_unit
_START = PrefetchOffload._start


def _wrap_by_number(self, number):
    """The rule that looks right: unit k + slots, counted around the end, into the slot of its own number."""
    self._next = number + 1
    following = (number + len(self._holds)) % len(self._held)
    self._fill(following % len(self._holds), following)


def _copy_before_the_unit_has_run(self, number):
    _AFTER(self, number)
    self._next = number


def _start_one_piece(self, slot, until):
    """As if the rest were another's."""
    _START(self, slot, min(until, self._started[slot] + 256))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("before_unit", lambda self, number: setattr(self, "_next", number)),
        ("before_unit", _copy_before_the_unit_has_run),
        ("after_unit", _wrap_by_number),
        ("_settle", lambda self: self._pending.clear()),
        ("_end", lambda self, module, args, output: setattr(self, "_owner", None)),
        ("_start", _start_one_piece),
        ("_begin", lambda self, fill: fill and self._fill(0, fill.unit)),
    ],
    ids=[
        "no wait",
        "copied too early",
        "slots by number around the end",
        "no wait at the end",
        "no end",
        "one piece",
        "one slot",
    ],
)
@torch.no_grad()
def test_faults_are_noticed(monkeypatch, name, fault):
    stock, model = pair(5)
    monkeypatch.setattr(PrefetchOffload, name, fault)
    noticed = False
    try:
        offloader = offload(model, LateCopies(), prefetch_step=2)
        for seed in range(3):
            x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))
            noticed |= not torch.equal(model(x), stock(x))
            offloader.check()
    except (EngineError, AssertionError, KeyError):
        noticed = True
    assert noticed
