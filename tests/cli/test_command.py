"""The command as a process: exit codes, streams, and a start that does not wait for torch."""

import os
import signal
import subprocess
import sys
import time

import greenroom

COMMAND = [sys.executable, "-c", "from greenroom.cli.main import main; main()"]


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


def test_ctrl_c():
    code = "import time, greenroom.cli.bench as b, greenroom.cli.session as s\n"
    code += "import contextlib, sys\n"
    code += "from greenroom.cli import generate\n"
    code += "def wait(*_, **__):\n    sys.stderr.write('ready\\n'); sys.stderr.flush(); time.sleep(60)\n"
    code += "generate.open_model = wait\n"
    code += "from greenroom.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "m", "--prompt", "x"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
