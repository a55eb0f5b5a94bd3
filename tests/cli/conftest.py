"""The command line over a stock model: what ``load`` does is other tests' subject."""

import dataclasses
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

import greenroom
from greenroom.config import OffloadConfig
from greenroom.experts.counters import LayerCounters, OffloadStats
from greenroom.experts.dispatch import CostModel
from tests.reference.families import make_model
from tests.reference.tokenizer import VOCAB, make_tokenizer

LAYERS = (LayerCounters(10, 6, 2, 4, 3, 1), LayerCounters(5, 3, 0, 3, 2, 2))
TOTAL = LayerCounters(15, 9, 2, 7, 5, 3)


@dataclasses.dataclass
class FakeGreenroom:
    """Stands in for greenroom's functions and notes how they were called.

    error: what ``load`` raises, if anything.
    """

    error: Exception | None = None
    config: OffloadConfig | None = None
    progress: object = None
    demand: object = None
    dtype: object = None
    loads: int = 0
    closes: int = 0

    def __post_init__(self) -> None:
        self.model = make_model("qwen3_moe")
        self.model.resize_token_embeddings(VOCAB)
        self.tokenizer = make_tokenizer()

    def load(self, model, *, dtype="auto", progress=True, config=None, demand=None):
        if self.error is not None:
            raise self.error
        self.loads += 1
        self.config, self.progress, self.demand, self.dtype = config, progress, demand, dtype
        return self.model, self.tokenizer

    def stats(self, model) -> OffloadStats:
        assert model is self.model
        return OffloadStats(
            policy=self.config.policy,
            device="cpu",
            isa="avx2",
            threads=2,
            cache_expert_num=4,
            host_bytes=5 << 20,
            device_bytes=1 << 20,
            page_locked=False,
            load_seconds=0.25,
            costs=CostModel(0, 1, 1),
            layers=LAYERS,
            total=TOTAL,
        )

    def close(self, model) -> None:
        assert model is self.model
        self.closes += 1


@pytest.fixture
def fake(monkeypatch) -> Iterator[FakeGreenroom]:
    """greenroom's functions replaced; every model that a command loads must be closed by it."""
    fake = FakeGreenroom()
    for name in ("load", "stats", "close"):
        monkeypatch.setitem(vars(greenroom), name, getattr(fake, name))  # setattr would import the lazy original
    yield fake
    assert fake.closes == fake.loads


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()
