"""``vllm serve`` with the plugin: its own process, engine and workers, spoken to over HTTP on this machine."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tests.vllm_plugin.conftest import ENVIRONMENT

TINY_MOE = Path(__file__).parents[2] / "examples" / "tiny-moe"


def ask(url, payload=None, timeout=60):
    data = None if payload is None else json.dumps(payload).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read().decode()


def wait_until_ready(process, url, log):
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            ask(f"{url}/health", timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(log.read_text()[-4000:])


@pytest.fixture
def environment(tmp_path):
    """``vllm serve`` asks for the version of a distribution called vllm; the CPU build's has another name."""
    record = tmp_path / "record" / "vllm-0.32.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    paths = [str(record.parent), os.environ.get("PYTHONPATH", "")]
    variables = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    # What this process has set for itself (vLLM's own import does, and the interpreter of Triton) stays here.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def serve(environment, log, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(TINY_MOE), *flags],
        env=environment,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )


def test_eight_clients_and_their_metrics(environment, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = tmp_path / "log", f"http://127.0.0.1:{port}"
    flags = f"--moe-expert-cache-size 8 --moe-offload-policy lru --host 127.0.0.1 --port {port} --enforce-eager"
    process = serve(environment, log, *flags.split(), "--max-model-len", "256", "--served-model-name", "tiny")
    try:
        wait_until_ready(process, url, log)
        prompts = [f"In the beginning {word}" for word in "was a man who did not know it".split()]

        def complete(prompt):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            return json.loads(ask(f"{url}/v1/completions", body))["choices"][0]["text"]

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(complete, prompts))
        assert all(together)
        assert complete(prompts[0]) == complete(prompts[0])
        metrics = ask(f"{url}/metrics")
        hits = re.findall(r'greenroom_expert_hits_total\{layer="(\d+)",rank="0"\} (\S+)', metrics)
        assert [int(layer) for layer, _ in hits] == list(range(8))
        assert sum(float(count) for _, count in hits) > 0
        assert "greenroom_expert_cpu_total" in metrics
        assert "vllm:" in metrics
        said = [line for line in log.read_text().splitlines() if "Expert offloading: 8 layers of 32 experts" in line]
        assert len(said) == 1
        assert "INFO" in said[0]
        assert "8 slots a layer" in said[0]
        assert "policy lru, cache_topk all" in said[0]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def test_a_conflict_ends_the_command_with_a_sentence(environment, tmp_path):
    log = tmp_path / "log"
    process = serve(environment, log, "--moe-offload", "--cpu-offload-gb", "4")
    assert process.wait(120) != 0
    assert "name other weights with --cpu-offload-params" in log.read_text()


def test_the_flags_are_in_the_help(environment):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "--help=MoeOffload"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "--moe-expert-cache-size" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
