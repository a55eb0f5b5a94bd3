#!/usr/bin/env python3
"""A large model with made-up weights in ``vllm serve`` with the plugin, asked by several clients at once over HTTP.

One JSON line on stdout: answers, errors, tokens, and where experts were. Exit status 1 if there was any error.

Usage: PYTHONPATH=src python scripts/vllm_over_http.py [--layers 48] [--slots 18] [--clients 8] [--requests 3]
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_engines import (
    claim_stdout,
    made_up_arguments,
    measured_with,
    prepare_environment,
    say,
    write_model,
)

from greenroom.bench.byte_tokenizer import byte_tokenizer

MODEL = "made-up"
PROMPT_TOKENS = (50, 1200)
REQUEST_S, START_S, END_S = 300, 900, 30
"""Longest times for an answer, and for the server's start and end."""

LETTERS = "abcdefghijklmnopqrstuvwxyz     "

Complete = Callable[[str], int]
"""Sends a prompt, returns how many tokens the answer had."""


def as_flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments of ``LLM`` as ``vllm serve`` takes them."""
    flags = []
    for name, value in arguments.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def fetch(url: str, body: dict[str, Any] | None = None, timeout: float = REQUEST_S) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        text: str = response.read().decode()
        return text


@contextmanager
def serve(flags: list[str], url: str) -> Iterator[float]:
    """Runs ``vllm serve``; gives the seconds that its start took.

    Raises:
        RuntimeError: it has ended, or is not up in time, or another one is there already.
    """
    if is_up(url):
        raise RuntimeError(f"another server answers at {url}; give another --port")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *flags]
    started = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while not is_up(url):
            if process.poll() is not None or time.monotonic() - started > START_S:
                raise RuntimeError("the server is not up; stderr says why")
            time.sleep(0.5)
        yield time.monotonic() - started
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            say("the server did not end when asked to, and is killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_up(url: str) -> bool:
    try:
        fetch(f"{url}/health", timeout=5)
    except OSError:
        return False
    return True


def completer(url: str, tokens: int) -> Complete:
    settings = {"model": MODEL, "max_tokens": tokens, "temperature": 0.7, "ignore_eos": True}

    def complete(prompt: str) -> int:
        answer = json.loads(fetch(f"{url}/v1/completions", settings | {"prompt": prompt}))
        return int(answer["usage"]["completion_tokens"])

    return complete


def run_client(number: int, requests: int, tokens: int, complete: Complete) -> list[int | str]:
    """Of each request, sent one after the other, the tokens of its answer or what went wrong."""
    source, found = random.Random(number), []
    for _ in range(requests):
        prompt = "".join(source.choices(LETTERS, k=source.randint(*PROMPT_TOKENS)))
        try:
            count = complete(prompt)
            found.append(count if count == tokens else f"{count} tokens instead of {tokens}")
        except Exception as error:  # whatever it is, it is a result
            found.append(f"{type(error).__name__}: {error}")
        say(f"client {number}: {found[-1]}")
    return found


def run_clients(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """All clients at once."""
    complete = completer(url, args.tokens)
    started = time.monotonic()
    with ThreadPoolExecutor(args.clients) as pool:
        work = [pool.submit(run_client, number, args.requests, args.tokens, complete) for number in range(args.clients)]
        results = [result for client in work for result in client.result()]
    seconds = time.monotonic() - started
    counts = [result for result in results if isinstance(result, int)]
    errors = [result for result in results if isinstance(result, str)]
    return {"answers": len(counts), "errors": errors, "tokens": sum(counts), "seconds": round(seconds, 1)}


def expert_shares(metrics: str) -> dict[str, float]:
    """Of all experts used, those from slots, over PCIe, and on the CPU."""
    counts = {}
    for name in ("hits", "streamed", "cpu"):
        by_layer = re.findall(rf"^greenroom_expert_{name}_total\{{.*\}} (\S+)$", metrics, re.MULTILINE)
        counts[name] = sum(map(float, by_layer))
    total = sum(counts.values())
    return {f"{name}_share": round(count / total, 3) if total else 0.0 for name, count in counts.items()}


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model, url = folder / "model", f"http://127.0.0.1:{args.port}"
    shape = write_model(model, args.shape, args.layers)
    # Most numbers that the model draws have no text; they count all the same.
    byte_tokenizer().save_pretrained(model)
    arguments = made_up_arguments(model, args.tp, args.util)
    del arguments["model"]
    arguments |= {
        "moe_expert_cache_size": args.slots,
        "served_model_name": MODEL,
        "host": "127.0.0.1",
        "port": args.port,
    }
    with serve([str(model), *as_flags(arguments)], url) as start_seconds:
        say(f"the server is up after {start_seconds:.1f} s")
        line = {"bench": "vllm-http", "shape": shape, "slots": args.slots, "tp": args.tp, "clients": args.clients}
        line |= run_clients(args, url)
        line |= expert_shares(fetch(f"{url}/metrics"))
    return line | {"start_seconds": round(start_seconds, 1)} | measured_with(args.commit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="q30-48L", help="a name from greenroom.bench.shapes")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--slots", type=int, default=18, help="experts of each layer on the GPU")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--util", type=float, default=0.9, help="gpu_memory_utilization")
    parser.add_argument("--fast-dummy", action="store_true", help="make weights up from one random block (seconds)")
    parser.add_argument("--commit", help="of greenroom; by default what git says")
    args, results = parser.parse_args(), claim_stdout()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended as well
    with tempfile.TemporaryDirectory() as name:
        prepare_environment(Path(name), args.fast_dummy)
        line = run(args, Path(name))
    results.write(json.dumps(line) + "\n")
    return int(bool(line["errors"]))


if __name__ == "__main__":
    sys.exit(main())
