"""In the checkpoint's own bfloat16, on a CPU: a request's text does not depend on the others."""

from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

import greenroom
from greenroom.serving.open import open_engine
from tests.server.conftest import TINY
from tests.server.serving import running
from tests.server.test_openai_client import PROMPTS, complete


def test_together_as_alone():
    model, tokenizer = greenroom.load(TINY, cache_expert_num=4, device="cpu", progress=False)
    assert model.config.dtype.itemsize == 2
    engine = open_engine(model, tokenizer, num_blocks=600, max_sequences=16)
    try:
        with (
            running(engine, tokenizer) as server,
            OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ):

            def text(prompt):
                return complete(client, prompt, max_tokens=64).choices[0].text

            alone = [text(prompt) for prompt in PROMPTS]
            assert len({*alone}) > 8
            with ThreadPoolExecutor(16) as pool:
                assert [*pool.map(text, PROMPTS)] == alone
    finally:
        engine.close()
        greenroom.close(model)
