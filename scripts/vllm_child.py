"""An engine of vLLM in a process of its own, which does as its parent says."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_engines import claim_stdout, generate, open_engine, random_prompts, step_work, timed, vocabulary_size

TEXT_LENGTHS = (2, 3, 5, 8, 13, 17, 26, 34, 47, 61, 75)
"""Tokens of the prompts whose answers are compared."""

TEXT_TOKENS, LIKELIEST = 40, 5


@dataclass(frozen=True)
class Answer:
    """tokens: greedy ones. likeliest: of each place the likeliest tokens, by text for JSON's sake, and their log
    probabilities."""

    tokens: list[int]
    likeliest: list[dict[str, float]]

    def margin(self, position: int, token: int) -> float | None:
        """How much likelier the own token is there than ``token``; None if that is not among the likeliest."""
        here = self.likeliest[position]
        other = here.get(str(token))
        return None if other is None else round(here[str(self.tokens[position])] - other, 5)


class ChildEngine:
    """The parent's side.

    Raises:
        RuntimeError: from any method, if the child has ended. It says why on stderr.
    """

    def __init__(self, name: str, arguments: dict[str, Any], cores: list[int] | None = None) -> None:
        """Returns before the engine has started.

        Args:
            arguments: of ``LLM``.
            cores: which the child may use; None for all.
        """
        self.name = name
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(arguments)]
        with running_on(cores):
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        self._read()

    def move_to(self, cores: list[int]) -> None:
        """From here on the child's threads run there, those too that were bound to cores of their own."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(ProcessLookupError):  # some come and go
                os.sched_setaffinity(int(thread.name), cores)

    def answers(self) -> list[Answer]:
        """Greedy ones to prompts that are the same every time; all of them twice."""
        self._send("answers")
        return [Answer(**answer) for answer in self._read()]

    def seconds(self, batch: int, prompt: int, tokens: int) -> float:
        """For ``tokens`` tokens behind each of ``batch`` random prompts of ``prompt`` tokens."""
        self._send(f"time {batch} {prompt} {tokens}")
        return float(self._read())

    def work(self, batch: int, steps: int) -> dict[str, float]:
        """What a decode step of ``batch`` sequences does, by so many ``steps``; see ``step_work``."""
        self._send(f"work {batch} {steps}")
        return dict(self._read())

    def close(self) -> None:
        """Ends the process; idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine '{self.name}' has ended; stderr says why")
        return json.loads(line)


@contextmanager
def running_on(cores: list[int] | None) -> Iterator[None]:
    """Keeps this thread on ``cores``, and what it starts: libraries count cores as soon as they are imported."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def answer(llm: Any, vocabulary: int, command: str) -> Any:
    """What the parent asked for."""
    name, *numbers = command.split()
    if name == "answers":
        prompts = random_prompts(list(TEXT_LENGTHS), vocabulary, seed=3)
        return [asdict(Answer(*pair)) for _ in range(2) for pair in generate(llm, prompts, TEXT_TOKENS, LIKELIEST)]
    run = {"time": timed, "work": step_work}[name]
    return run(llm, vocabulary, *map(int, numbers))


def main() -> int:
    results, arguments = claim_stdout(), json.loads(sys.argv[1])
    with open_engine(arguments) as llm:
        vocabulary = vocabulary_size(Path(arguments["model"]))
        results.write("null\n")
        for command in sys.stdin:
            results.write(json.dumps(answer(llm, vocabulary, command)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
