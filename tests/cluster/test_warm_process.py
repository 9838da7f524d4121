"""Forks of a warm process behave like processes of their own: output, exit codes, signals, bits of losses."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.cluster.warm_process import start
from tests.support.cases import config, flags
from tests.support.hand_over import run_instead
from tests.support.launch import PROGRAM, ROOT, rank_environment, warm_socket

ENVIRON = {**rank_environment(0, 1, 0), "COLUMNS": "100"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    del ENVIRON[name]
INSTEAD = "import sys; from tests.support.hand_over import run_instead; run_instead(sys.argv[1], sys.argv[2:])"
COMMANDS = {
    "prints": [PROGRAM, "compare", "--model", "gpt2", "--world_size", "4", "--gpu", "a100-40"],
    "is_rejected": [PROGRAM, "check", "--stepz=3"],
    "runs_a_module": ["-m", "pretrain", "reference", "metrics"],
    "reads_stdin": ["-c", "import sys; print(input(), sys.argv, sys.path[0], __name__)", "word"],
    "fails": ["-c", "import sys; print('out', flush=True); sys.exit('reason')"],
    "raises": ["-c", "import atexit; atexit.register(print, 'at exit'); raise ValueError('reason')"],
    "is_killed": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "is_unbuffered": ["-u", "-c", "import os; print('first'); os.write(1, b'second')"]}


def run(command: list[str], cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(command, cwd=cwd, env=ENVIRON, input="a line\n", capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("  ")]  # without frames of a traceback
    return done.returncode, done.stdout, "\n".join(errors)


@pytest.mark.parametrize("case", COMMANDS)
def test_a_fork_prints_and_ends_like_a_process(case: str, tmp_path: Path) -> None:
    command = COMMANDS[case]
    assert run([sys.executable, "-c", INSTEAD, warm_socket(), *command], tmp_path) == \
        run([sys.executable, *command], tmp_path)


def test_a_training_has_the_same_bits(corpus: str, tmp_path: Path) -> None:
    rows: list[list[dict[str, Any]]] = []
    (tmp_path / "ds.json").write_text(json.dumps(config(1, micro=2)))
    given = {"deepspeed_config": "ds.json", **flags(corpus, layers=1, hidden=32, steps=4)}
    for name, before in (("process", []), ("fork", ["-c", INSTEAD, warm_socket()])):
        words = [f"--{key}={value}" for key, value in {**given, "save": name}.items()]
        code, _, errors = run([sys.executable, *before, str(ROOT / "pretrain" / "train.py"), *words], tmp_path)
        assert code == 0, errors
        rows.append([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    process, fork = ([(row["step"], row.get("loss"), row.get("grad_norm"), row.get("valid_loss")) for row in each]
                     for each in rows)
    assert process == fork != []


def test_signals_reach_the_fork(tmp_path: Path) -> None:
    """A fork gets the signals of the process that waits for it, and is killed if this process is."""
    words = ["-c", "import signal, time\nsignal.signal(15, lambda *_: exit(7))\nprint('waits', flush=True)\n"
                   "time.sleep(900)"]
    for number, code in ((signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([sys.executable, "-c", INSTEAD, warm_socket(), *words], env=ENVIRON, cwd=tmp_path,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(number)
            assert process.stdout.read() == ""  # until the fork has ended, too
            if number != signal.SIGINT:
                assert process.wait() == code


def test_another_environment_and_no_warm_process_change_nothing(tmp_path: Path) -> None:
    """The caller continues if libraries would have read other variables, or if nothing listens."""
    assert start(warm_socket(), ["-c", ""], cwd=str(tmp_path), environ={**ENVIRON, "OMP_NUM_THREADS": "3"},
                 same_imports=True) is None
    run_instead(str(tmp_path / "missing"), ["-c", ""])


def test_a_fork_has_no_thread_and_no_file_of_the_warm_process(tmp_path: Path) -> None:
    program = "import os; print(len(os.listdir('/proc/self/task')), [os.readlink(f'/proc/self/fd/{n}') for n in " \
              "os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}') and int(n) > 2])"
    _, printed, _ = run([sys.executable, "-c", INSTEAD, warm_socket(), "-c", program], tmp_path)
    assert printed.startswith("1 [")
    assert "socket:" not in printed
