"""The serving benchmark measures what it says."""

import json

import pytest
from typer.testing import CliRunner

from greenroom.bench import serving
from greenroom.bench.serving import bench_serving, longest_gap
from greenroom.cli.main import app
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError, EngineError

CPU = OffloadConfig(device="cpu", context_num_threads=1)


def test_the_numbers_hang_together():
    # 500 tokens, two of each pass for those that decode: two chunks, of which each gap holds one.
    result = bench_serving("small", 2, 500, CPU, max_step_tokens=256, steps=8, repeats=2)
    assert (result.bench, result.requests, result.batch, result.tokens) == ("serving", 2, 2, 500)
    assert result.bound == result.pass_ms + result.quiet_gap_ms
    assert 0 < result.value <= result.worst_gap_ms
    assert result.value < result.first_token_ms
    assert result.quiet_gap_ms <= result.worst_quiet_gap_ms
    # Each request gets a token a step, and no step takes longer than the longest gap.
    assert result.decode_tok_s >= 2 * 1e3 / result.worst_quiet_gap_ms
    assert result.single_tok_s > 0
    # The gap lasts a chunk at least, which is nearly all of what one pass takes.
    assert result.value > result.pass_ms / 4


def test_longest_gap():
    streams = [[0.0, 1.0, 2.0, 7.0], [0.5, 3.5, 4.0, 4.5]]
    assert longest_gap(streams, 0.0, 10.0) == 5.0
    assert longest_gap(streams, 0.6, 1.5) == 3.0  # begun before, and ended after
    assert longest_gap(streams, 0.1, 0.4) == 1.0
    assert longest_gap(streams, 6.0, 6.5) == 5.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": "large"}, "unknown shape"),
        ({"requests": 0}, "--requests must be 1 to 32, not 0"),
        ({"requests": 33}, "--requests must be 1 to 32, not 33"),
        ({"tokens": 0}, "--tokens must be at least 1"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"max_step_tokens": 2}, "--max-step-tokens must be more than --requests, not 2"),
        ({"tokens": 8192}, "holds 8192 tokens"),
        ({"max_step_tokens": 8192}, "holds 8192 tokens"),
        ({"routing": "no such trace.npy"}, "cannot read the routing trace"),
    ],
)
def test_what_makes_no_sense_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        bench_serving(**{"shape": "small", "requests": 2, "tokens": 100, "knobs": CPU} | change)


def test_a_request_that_ends_too_early_is_no_measurement(monkeypatch):
    monkeypatch.setattr(serving, "_EXTRA_TOKENS", 0)
    with pytest.raises(EngineError, match="ended before its measurement did"):
        bench_serving("small", 1, 40, CPU, max_step_tokens=64, steps=1, repeats=1)


def test_command():
    flags = "--shape small --requests 2 --tokens 100 --steps 2 --max-step-tokens 64 --device cpu"
    result = CliRunner().invoke(app, ["bench", "serving", *flags.split(), "--json"])
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert (fields["bench"], fields["shape"], fields["unit"], fields["repeats"]) == ("serving", "small", "ms", 3)
    assert (fields["requests"], fields["tokens"], fields["max_step_tokens"], fields["steps"]) == (2, 100, 64, 2)
    refused = CliRunner().invoke(app, ["bench", "serving", "--requests", "0", "--json"])
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
