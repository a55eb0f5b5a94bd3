"""What flags and ``additional_config`` mean, without vLLM."""

import pytest

from greenroom.errors import ConfigError
from greenroom.vllm_plugin.options import CONFIG_KEY, FLAGS, MoeOffloadOptions, collect


def test_nothing_given_is_no_offloading():
    assert collect({}) is None
    assert collect({flag.name: None for flag in FLAGS}) is None
    assert collect({"moe_offload": False}) is None
    for additional in ({}, {CONFIG_KEY: None}, {CONFIG_KEY: False}, {"other": 1}, object()):
        assert MoeOffloadOptions.from_additional_config(additional) is None


def test_every_flag_reaches_its_field():
    given = {
        "moe_offload": True,
        "moe_offload_cache_expert_num": 7,
        "moe_offload_cache_topk": 3,
        "moe_offload_update_expert_num": 1,
        "moe_offload_context_num_threads": 5,
        "moe_offload_policy": "lru",
    }
    options = MoeOffloadOptions(**collect(given))
    assert options == MoeOffloadOptions(7, 3, 1, 5, "lru")
    assert MoeOffloadOptions.from_additional_config({CONFIG_KEY: options.to_dict()}) == options
    config = options.to_config()
    assert (config.cache_expert_num, config.cache_topk, config.update_expert_num) == (7, 3, 1)
    assert (config.context_num_threads, config.policy) == (5, "lru")


def test_the_short_form():
    assert collect({"moe_expert_cache_size": 9}) == {"cache_expert_num": 9}
    assert collect({"moe_expert_cache_size": 9, "moe_offload": True}) == {"cache_expert_num": 9}
    assert collect({"moe_expert_cache_size": 0}) == {"cache_expert_num": 0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"moe_expert_cache_size": 1, "moe_offload": False}, "give one of them"),
        ({"moe_expert_cache_size": 1, "moe_offload_cache_expert_num": 1}, "give one of them"),
        ({"moe_offload_policy": "lru"}, "--moe-offload-policy needs --moe-offload"),
        ({"moe_offload_cache_topk": 1, "moe_offload": False}, "needs --moe-offload"),
    ],
)
def test_flags_that_contradict_each_other(given, says):
    with pytest.raises(ConfigError, match=says):
        collect(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("yes", "is true or a dictionary"),
        ({"cache": 1}, "has no field cache; choose from cache_expert_num"),
        ({"cache_expert_num": -1}, "at least 0"),
        ({"cache_topk": 0}, "at least 1"),
        ({"update_expert_num": True}, "whole number"),
        ({"context_num_threads": 0}, "at least 1"),
        ({"policy": "magic"}, "no policy 'magic'; choose one of .*lfru"),
        (
            {"policy": "static"},
            "no policy 'static', since .* profile",
        ),
    ],
)
def test_an_additional_config_that_makes_no_sense(given, says):
    with pytest.raises(ConfigError, match=says):
        MoeOffloadOptions.from_additional_config({CONFIG_KEY: given})


def test_policies_in_the_help_are_those_that_are_taken():
    (text,) = [flag.help for flag in FLAGS if flag.name == "moe_offload_policy"]
    names = text.rpartition(": ")[2].rstrip(".").split(", ")
    assert {"lru", "lfu", "lfru"} <= set(names)
    for name in names:
        MoeOffloadOptions(policy=name)


@pytest.mark.parametrize("name", ["magic", "static"])
def test_policies_that_an_error_offers_are_those_that_are_taken(name):
    with pytest.raises(ConfigError) as caught:
        MoeOffloadOptions(policy=name)
    for other in str(caught.value).rpartition("choose one of ")[2].split(", "):
        MoeOffloadOptions(policy=other)


def test_true_is_offloading_without_slots():
    assert MoeOffloadOptions.from_additional_config({CONFIG_KEY: True}) == MoeOffloadOptions()
