"""What is selected, how it lies in its block, and which options contradict each other."""

import pytest
import torch
from torch import nn

from greenroom.errors import ConfigError
from greenroom.weights.config import WeightOffloadConfig
from greenroom.weights.make import make_weight_offloader
from greenroom.weights.select import Selection, WeightInfo, select, weights_of

BF16 = torch.bfloat16


def weight(name: str, *shape: int, dtype=BF16) -> WeightInfo:
    return WeightInfo((name,), shape, dtype)


def layers(count: int) -> list[WeightInfo]:
    weights = [weight("model.embed_tokens.weight", 100, 8)]
    for index in range(count):
        base = f"model.layers.{index}"
        weights += [
            weight(f"{base}.self_attn.q_proj.weight", 16, 8),
            weight(f"{base}.self_attn.sinks", 5),
            weight(f"{base}.mlp.gate.weight", 4, 8),
            weight(f"{base}.norm.weight", 8),
        ]
    return [*weights, weight("lm_head.weight", 100, 8)]


def prefetch(count: int = 8, **settings) -> Selection:
    return select(layers(count), "model", WeightOffloadConfig("prefetch", **settings))


@pytest.mark.parametrize("group", range(1, 6))
def test_layers_by_the_rule_of_groups(group):
    for number in range(1, group + 1):
        expected = [layer for layer in range(11) if layer % group >= group - number]
        selection = prefetch(11, group_size=group, num_in_group=number)
        assert [unit.layer for unit in selection.units] == expected


def test_bytes():
    selection = prefetch(prefetch_step=3)
    assert selection.units[0].nbytes == 4 * 256
    assert selection.weight_bytes == 8 * 2 * (16 * 8 + 5 + 4 * 8 + 8)
    assert (selection.num_slots, selection.device_bytes, selection.host_bytes) == (3, 3 * 1024, 8 * 1024)
    assert prefetch(prefetch_step=30).num_slots == 8


@pytest.mark.parametrize(("step", "copied"), [(1, 8), (4, 8), (5, 6), (7, 2), (8, 0), (20, 0)])
def test_bytes_of_a_pass(step, copied):
    assert prefetch(prefetch_step=step).pass_bytes == copied * 1024


def test_bytes_of_a_pass_read_in_place():
    selection = select(layers(3), "model", WeightOffloadConfig("uva"))
    assert selection.pass_bytes == selection.weight_bytes


@pytest.mark.parametrize(
    ("params", "module", "count"),
    [
        (None, "model.layers.0", 4),
        ("self_attn", "model.layers.0.self_attn", 2),
        ("q_proj", "model.layers.0.self_attn", 1),
        ("gate", "model.layers.0.mlp", 1),  # not the router itself: its neighbours may read it
        ("q_proj|gate", "model.layers.0", 2),
        (r"layers\.[05]\.norm", "model.layers.0.norm", 1),
    ],
)
def test_a_pattern_chooses_weights_and_whose_turn_it_is(params, module, count):
    unit = prefetch(params=params).units[0]
    assert unit.module == module
    assert len(unit.weights) == count


def test_views_lie_behind_each_other():
    selection = select([weight("layers.0.a", 3), weight("layers.0.b", 2, 70, dtype=torch.float32)], "", prefetch_all())
    (unit,) = selection.units
    block = torch.zeros(unit.nbytes, dtype=torch.uint8)
    first, second = unit.views(block)
    first.fill_(1.0)
    second.fill_(2.0)
    assert block[:6].view(BF16).tolist() == [1, 1, 1]
    assert block[256 : 256 + 560].view(torch.float32).tolist() == [2.0] * 140
    assert unit.nbytes == 256 + 768


def prefetch_all() -> WeightOffloadConfig:
    return WeightOffloadConfig("prefetch")


def test_only_the_decoders_own_layers_count():
    weights = [weight("vision.layers.0.w", 4), *layers(2)]
    assert [unit.module for unit in select(weights, "model", prefetch_all()).units] == [
        "model.layers.0",
        "model.layers.1",
    ]


def test_uva_takes_weights_outside_of_layers_if_they_are_named():
    everything = select(layers(2), "model", WeightOffloadConfig("uva"))
    assert [unit.module for unit in everything.units] == ["model.layers.0", "model.layers.1"]
    assert everything.device_bytes == 0
    (unit,) = select(layers(2), "model", WeightOffloadConfig("uva", params="embed_tokens")).units
    assert (unit.layer, unit.module) == (None, "model.embed_tokens")


def test_shared_weights():
    shared = WeightInfo(("model.layers.0.a.weight", "model.layers.1.a.weight"), (4,), BF16)
    weights = [shared, weight("model.layers.1.b.weight", 4)]
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.a\.weight' is the same weight as 'model\.layers\.1"):
        select(weights, "model", prefetch_all())
    assert len(select(weights, "model", WeightOffloadConfig("prefetch", params=r"\.b\.")).units) == 1
    assert select(weights, "model", WeightOffloadConfig("uva")).host_bytes == 2 * 256


def test_tied_parameters_of_a_module_are_one_weight():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    expected = WeightInfo(("embed.weight", "head.weight"), (4, 3), torch.float32)
    assert weights_of(model) == (expected,)
    assert weights_of(model, without=model.parameters()) == ()


def test_what_selects_nothing_is_said():
    with pytest.raises(ConfigError, match=r"of the 2 layers none has i % 4 >= 3; give a smaller"):
        prefetch(2, group_size=4)
    with pytest.raises(ConfigError, match=r"'embed' is found in no weight of an offloaded decoder layer"):
        prefetch(params="embed")
    with pytest.raises(ConfigError, match=r"'nothing' is found in no weight of the model"):
        select(layers(2), "model", WeightOffloadConfig("uva", params="nothing"))


def test_in_words():
    assert str(select(layers(2), "model", WeightOffloadConfig())) == "none"
    text = str(prefetch(4, group_size=2, params="self_attn", prefetch_step=2))
    assert text == ("prefetch, 4 weights of 2 of 4 layers, 0.0 MB in host memory, 2 buffers of 0.0 MB on the device")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, WeightOffloadConfig()),
        ({"backend": "none"}, WeightOffloadConfig()),
        ({"group_size": 4}, WeightOffloadConfig("prefetch", 4)),
        ({"backend": "prefetch"}, WeightOffloadConfig("prefetch")),
        ({"group_size": 4, "num_in_group": 3, "prefetch_step": 2}, WeightOffloadConfig("prefetch", 4, 3, 2)),
        ({"backend": "uva", "params": "attn"}, WeightOffloadConfig("uva", params="attn")),
    ],
)
def test_chosen_from_what_was_given(given, expected):
    assert WeightOffloadConfig.choose(**given) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"backend": "magic"}, "unknown weights_offload_backend 'magic'; choose one of none, prefetch, uva"),
        ({"group_size": 0}, "weights_offload_group_size must be a whole number of at least 1, not 0"),
        ({"group_size": 2, "num_in_group": 3}, "weights_offload_num_in_group of 3 is more than the group's 2"),
        ({"group_size": 2, "prefetch_step": -1}, "weights_offload_prefetch_step must be"),
        ({"prefetch_step": 2}, "weights_offload_prefetch_step has no effect without offloaded weights"),
        ({"params": "attn"}, "weights_offload_params has no effect"),
        ({"backend": "none", "group_size": 2}, "weights_offload_group_size has no effect"),
        ({"backend": "uva", "prefetch_step": 2}, "no effect with the uva backend"),
        ({"backend": "uva", "params": "("}, r"'\(' is no regular expression"),
    ],
)
def test_contradictions(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        WeightOffloadConfig.choose(**given)


def test_backends():
    cpu = torch.device("cpu")
    none = make_weight_offloader(select(layers(2), "model", WeightOffloadConfig()), cpu)
    none.take(nn.Linear(2, 2))
    none.close()
    with pytest.raises(ConfigError, match="the uva backend lets a GPU read host memory, but the device is cpu"):
        make_weight_offloader(select(layers(2), "model", WeightOffloadConfig("uva")), cpu)
    with pytest.raises(ConfigError, match="need page-locked memory"):
        make_weight_offloader(prefetch(2), torch.device("cuda"), pin_memory=False)


def test_the_active_one_is_logged(caplog):
    caplog.set_level("INFO", logger="greenroom")
    make_weight_offloader(prefetch(2), torch.device("cpu"))
    make_weight_offloader(select(layers(2), "model", WeightOffloadConfig()), torch.device("cpu"))
    assert "weight offload: prefetch, 8 weights of 2 of 2 layers" in caplog.text
    assert "weight offload: none" in caplog.text
    assert "saves no device memory" not in caplog.text
    make_weight_offloader(prefetch(2, prefetch_step=2), torch.device("cpu"))
    assert "saves no device memory: prefetch_step of 2 has a buffer for each of 2 offloaded layers" in caplog.text
