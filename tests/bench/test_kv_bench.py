"""The KV benchmarks measure what they say."""

import pytest

from greenroom.bench import kv
from greenroom.bench.kv import RUN_BYTES, bench_kv
from greenroom.bench.kv_prefix import bench_kv_prefix
from greenroom.config import OffloadConfig
from greenroom.errors import ConfigError

CPU = OffloadConfig(device="cpu", context_num_threads=1)


def test_blocks(monkeypatch):
    monkeypatch.setattr(kv, "_CPU_JOB_BYTES", 1 << 20)
    results = list(bench_kv("cpu"))
    assert [result.run_bytes for result in results] == list(RUN_BYTES)
    for result in results:
        assert result.block_bytes == result.tensors * result.run_bytes
        assert result.way == "index"
        assert min(result.value, result.store_gb_s, result.load_gb_s_together, result.store_gb_s_together) > 0
    assert results[0].blocks == (1 << 20) // results[0].block_bytes


@pytest.mark.parametrize("tokens", [200, 208])
def test_prefix(tokens):
    result = bench_kv_prefix("small", tokens, CPU, repeats=2)
    assert result.loaded_tokens == tokens - 1  # all that may be reused, however many blocks it fills
    assert min(result.value, result.recomputed_ms, result.on_device_ms) > 0
    assert result.speedup == result.recomputed_ms / result.value


@pytest.mark.parametrize("change", [{"shape": "large"}, {"tokens": 3}, {"repeats": 0}])
def test_what_makes_no_sense_is_refused(change):
    with pytest.raises(ConfigError):
        bench_kv_prefix(**{"shape": "small", "tokens": 100, "knobs": CPU} | change)
