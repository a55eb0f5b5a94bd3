"""The example model behind a server, loaded once."""

import pytest
import torch
from openai import OpenAI

import greenroom
from greenroom.engine.offload import offload_of
from greenroom.serving.open import open_engine
from tests.server.serving import running

TINY = "examples/tiny-moe"


@pytest.fixture(scope="package")
def tiny():
    # In bfloat16 two tokens are often equally likely, and which one comes depends on who else is in the batch.
    model, tokenizer = greenroom.load(
        TINY, dtype=torch.float32, cache_expert_num=4, context_num_threads=1, device="cpu", progress=False
    )
    # Less memory than all sequences may need, so that some have to wait or give up their blocks.
    engine = open_engine(model, tokenizer, num_blocks=300, max_sequences=8, max_step_tokens=256)
    sizes = [format.block_bytes for format in offload_of(model).manager.store.formats]
    try:
        with running(engine, tokenizer, offload=lambda: greenroom.stats(model), expert_bytes=sizes) as server:
            yield server
    finally:
        engine.close()
        greenroom.close(model)


@pytest.fixture(scope="package")
def client(tiny):
    with OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
