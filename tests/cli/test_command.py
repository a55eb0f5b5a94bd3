"""The command as a process: exit codes, streams, and a start that does not wait for torch."""

import signal
import subprocess
import sys

import greenroom

COMMAND = [sys.executable, "-m", "greenroom"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_help():
    result = run("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("generate", "chat", "bench"))


def test_version():
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout == f"greenroom {greenroom.__version__}\n"


def test_help_and_wrong_knobs_do_not_wait_for_torch():
    code = "import sys; from greenroom.cli import main; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "[]\n", result.stderr


def test_usage_errors():
    for arguments in (["nonsense"], ["generate", "m"], ["generate", "m", "--prompt", "x", "--max-tokens", "many"]):
        result = run(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr


def test_a_users_mistake_is_one_sentence_on_stderr():
    result = run("generate", "m", "--prompt", "x", "--cache-expert-num", "-1", "--json")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "greenroom: cache_expert_num must be a whole number of at least 0, not -1\n"


INTERRUPTIBLE = """
import signal, sys, time
from greenroom.cli import generate, main

def wait(*_, **__):
    sys.stderr.write("ready\\n")
    sys.stderr.flush()
    time.sleep(60)

# A background job of a shell starts with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
generate.open_model = wait
main.main()
"""


def test_ctrl_c():
    arguments = [sys.executable, "-c", INTERRUPTIBLE, "generate", "m", "--prompt", "x"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
