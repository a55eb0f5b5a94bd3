"""The flags of offloading, as commands get them: every one arrives, among the command's own."""

import dataclasses

import pytest
import typer

from greenroom.cli import options
from greenroom.cli.main import app
from greenroom.cli.offload_options import takes_offload_config
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError

FLAGS = """--vram 3GiB --cache-topk 3 --update-expert-num 4 --context-num-threads 5 --policy static --profile file.json
    --device cuda:7 --isa avx2 --no-pin-memory --weights-offload-group-size 6 --weights-offload-num-in-group 2
    --weights-offload-prefetch-step 2 --weights-offload-params attn --weights-offload-backend prefetch"""


@pytest.fixture
def command():
    """A command with flags of its own on both sides, and what it was called with."""
    calls = []
    probe = typer.Typer()

    @probe.command()
    @takes_offload_config
    def run(model: options.Model, *, dtype: options.Dtype = "auto", config: OffloadConfig, seed: options.Seed = None):
        """The command's own help."""
        calls.append((model, dtype, config, seed))

    return probe, calls


def test_all_arrive(runner, command):
    probe, calls = command
    result = runner.invoke(probe, ["m", *FLAGS.split(), "--seed", "9", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    expected = OffloadConfig(
        vram="3GiB",
        cache_topk=3,
        update_expert_num=4,
        context_num_threads=5,
        policy="static",
        profile="file.json",
        device="cuda:7",
        isa="avx2",
        pin_memory=False,
        weights_offload_group_size=6,
        weights_offload_num_in_group=2,
        weights_offload_prefetch_step=2,
        weights_offload_params="attn",
        weights_offload_backend="prefetch",
    )
    assert calls == [("m", "float16", expected, 9)]
    defaults = OffloadConfig()
    same = [f.name for f in dataclasses.fields(expected) if getattr(expected, f.name) == getattr(defaults, f.name)]
    assert same == ["cache_expert_num", "miss_expert_num"], "every other flag was given another value"


def test_none_is_the_default(runner, command):
    probe, calls = command
    assert runner.invoke(probe, ["m"]).exit_code == 0
    assert runner.invoke(probe, ["m", "--cache-expert-num", "0"]).exit_code == 0
    assert calls == [("m", "auto", OffloadConfig(), None), ("m", "auto", OffloadConfig(cache_expert_num=0), None)]


def test_a_wrong_value_stops_the_command(runner, command):
    probe, calls = command
    result = runner.invoke(probe, ["m", "--cache-topk", "0"])
    assert isinstance(result.exception, ConfigError)
    assert not calls


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_commands_that_load_a_model_have_them_all(runner, name):
    text = runner.invoke(app, [name, "--help"]).output
    missing = [flag for flag in [*FLAGS.split(), "--cache-expert-num"] if flag.startswith("--") and flag not in text]
    assert not missing
    assert "--config" not in text
