"""The command as a process: what it says at its start, and how signals end it."""

import json
import re
import signal
import subprocess
import sys
import threading

import httpx2 as httpx
import pytest

from tests.server.conftest import TINY
from tests.server.serving import until

COMMAND = [sys.executable, "-m", "greenroom", "serve"]


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        command = [*COMMAND, TINY, "--port", "0", "--device", "cpu", "--context-num-threads", "1", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        until(lambda: "serving" in self.said or self.process.poll() is not None)
        found = re.search(r"http://[\d.]+:\d+", self.said)
        assert found, self.said
        self.url = found[0]

    def _read(self) -> None:
        for line in self.process.stderr:
            self.said += line

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def result(self) -> int:
        code = self.process.wait(60)
        self._reader.join()
        return code

    def stream(self, max_tokens: int):
        body = {"model": "tiny-moe", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60)


@pytest.fixture
def start():
    started = []

    def start_(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield start_
    for server in started:
        server.process.kill()
        server.result()


def test_running_requests_finish(start):
    server = start("--cache-expert-num", "4")
    for word in ("tiny-moe", "cpu", "4 expert slots", "policy lfru", "12.0 MiB", "1 thread", "blocks of 16", "DBO"):
        assert word in server.said, server.said
    with server.stream(300) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        late = httpx.post(f"{server.url}/v1/completions", json={"model": "tiny-moe", "prompt": "x"})
        assert late.status_code == 503
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.result() == 0
    assert "Traceback" not in server.said


def test_not_longer_than_allowed_and_a_second_signal(start):
    server = start("--drain-timeout", "0.3")
    with server.stream(2000) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        assert "shutting down" in [line for line in lines if line][-1]
    assert server.result() == 0
    assert "Traceback" not in server.said

    server = start()
    with server.stream(2000) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        server.signal(signal.SIGINT)
        with pytest.raises(httpx.HTTPError):
            list(lines)
    assert server.result() == -signal.SIGINT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-sequences", "0"], "--max-sequences must be at least 1"),
        (["--kv-cache", "much"], "is not a size"),
        (["--api-key", ""], "--api-key is empty"),
        (["--dbo", "maybe"], "dbo is auto, on or off, not 'maybe'"),
        (["--dbo", "on", "--device", "cpu"], "dbo cannot be on: decode steps are no graphs"),
        (["--request-timeout", "0"], "--request-timeout must be above 0"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--host", ""], "--host is empty"),
        (["--max-context", "0"], "--max-context must be at least 1, not 0"),
        (["--max-context", "999999"], "ask for at most so many, not 999999"),
        (["--max-step-tokens", "0"], "--max-step-tokens must be at least 1, not 0"),
        (["--served-model-name", " "], "--served-model-name is empty"),
    ],
)
def test_wrong_options(arguments, says):
    result = run(TINY, *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert "Loading weights" not in result.stderr


def test_a_missing_extra_is_one_sentence():
    code = (
        "import sys; sys.modules['fastapi'] = None; from greenroom.cli.main import main; "
        f"sys.argv = ['greenroom', 'serve', '{TINY}']; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert 'pip install "greenroom[serve]"' in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_command_line_does_not_wait_for_the_server():
    code = "import sys, greenroom.cli.main; print(sorted({'torch', 'fastapi', 'llguidance'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr
