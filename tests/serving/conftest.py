"""What the tests of the serving engine share."""

import pytest
import torch

from greenroom.serving.engine import ModelFacts, ServingEngine
from tests.reference.tokenizer import VOCAB
from tests.serving.drive import EOS
from tests.serving.gated import TOKENIZER, GatedRunner


@pytest.fixture
def opened():
    engines = []

    def open_(runner=None, context_length=200, **knobs) -> ServingEngine:
        runner = runner or GatedRunner(num_blocks=64, block_size=4, max_sequences=4, max_tokens=32, vocabulary=VOCAB)
        facts = ModelFacts(VOCAB, context_length, frozenset({EOS}), torch.device("cpu"))
        engine = ServingEngine(facts, TOKENIZER, runner, **knobs)
        engine.runner = runner
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.runner.open.set()
        engine.close()
        assert not engine._thread.is_alive()
        assert engine.runner.closed
