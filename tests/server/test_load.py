"""Everything at once: short and long prompts, clients that go, wrong requests. Nothing may leak, and metrics add up."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx

from tests.server.serving import MODEL, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WRONG = [b"{", b"[]", b'{"model": 1}', b"\xff", b'{"model": "test", "prompt": "x", "top_p": 7}']


def one(server, number: int) -> str:
    """What a client does, and how it should end."""
    rng = random.Random(number)
    kind = rng.choice(["whole", "whole", "stream", "stream", "gone", "cut", "wrong"])
    if kind == "wrong":
        path = rng.choice([CHAT, COMPLETIONS])
        response = server.post(path, content=rng.choice(WRONG), headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        return "rejected"
    prompt = [rng.randrange(5, 4096) for _ in range(rng.choice([10, 40, 200, 700, 1500]))]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randrange(1, 24), "ignore_eos": True}
    if kind == "gone":
        try:
            server.post(COMPLETIONS, body | {"max_tokens": 400}, timeout=rng.random())
        except httpx.TimeoutException:
            return "disconnected"
        raise AssertionError("400 tokens came within a second")
    if kind == "whole":
        response = server.post(COMPLETIONS, body)
        assert response.json()["usage"]["completion_tokens"] == body["max_tokens"]
        return "success"
    more = {"stream": True, "max_tokens": 400 if kind == "cut" else body["max_tokens"]}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body | more, timeout=120) as response:
        lines = response.iter_lines()
        if kind == "cut":
            next(lines)
            return "disconnected"
        assert [line for line in lines if line][-1] == "data: [DONE]"
        return "success"


def test_mixed_load(tiny):
    alone = tiny.post(COMPLETIONS, {"model": MODEL, "prompt": "Once", "temperature": 0}).json()["choices"]
    before, stats = tiny.metrics(), tiny.engine.stats()
    with ThreadPoolExecutor(12) as pool:
        ends = [*pool.map(lambda number: one(tiny, number), range(50))]
    until(lambda: tiny.engine.stats().running + tiny.engine.stats().waiting == 0)
    time.sleep(0.1)  # the last disconnect is counted when its task has ended
    assert tiny.engine.stats().kv_blocks_used == 0
    assert tiny.get("/health").status_code == 200
    assert tiny.post(COMPLETIONS, {"model": MODEL, "prompt": "Once", "temperature": 0}).json()["choices"] == alone

    after = tiny.metrics()

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after.get(key, 0) - before.get(key, 0)

    for outcome in ("success", "disconnected", "rejected"):
        both = sum(grown("greenroom_http_requests_total", path=path, outcome=outcome) for path in (CHAT, COMPLETIONS))
        assert both == ends.count(outcome) + (outcome == "success")
    now = tiny.engine.stats()
    assert grown("greenroom_completion_tokens_total") == now.completion_tokens - stats.completion_tokens
    assert grown("greenroom_prompt_tokens_total") == now.prompt_tokens - stats.prompt_tokens
    lengths = grown("greenroom_outputs_total", reason="length")
    assert lengths >= ends.count("success")
    assert grown("greenroom_request_seconds_count", reason="length") == lengths
    assert after["greenroom_kv_blocks", ()] == now.kv_blocks
    assert after["greenroom_running_requests", ()] == 0


def test_experts_add_up(tiny):
    for prompt in ("Once upon a time there was", "The king said"):
        assert tiny.post(COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 16}).status_code == 200
    metrics = tiny.metrics()
    sizes = {value for (name, _), value in metrics.items() if name == "greenroom_expert_slots"}
    assert sizes == {4}
    layers = [str(index) for index in range(8)]

    def of(name: str, layer: str) -> float:
        return metrics[f"greenroom_expert_{name}_total", (("layer", layer),)]

    assert all(of("hits", layer) + of("misses", layer) > 0 for layer in layers)
    assert sum(of("cpu", layer) for layer in layers) > 0
    routes = {
        dict(labels)["route"]: value
        for (name, labels), value in metrics.items()
        if name == "greenroom_expert_bytes_total"
    }
    per_expert = 3 * 128 * 64 * 4
    assert routes["cpu"] >= sum(of("cpu", layer) for layer in layers) * per_expert
    assert routes["cache"] >= sum(of("hits", layer) for layer in layers) * per_expert
    copies = sum(of("copies", layer) for layer in layers)
    assert routes["streamed"] + routes["admitted"] >= copies * per_expert
