"""Output of a run in a real terminal. Files, pipes and terminals of launchers must get no control characters."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pretrain.monitor import meter
from pretrain.monitor.training_row import row_line
from pretrain.resilience.lease_file import read_lease
from pretrain.resilience.run_lock import LOCK
from tests.support.launch import ROOT, free_port
from tests.support.lock_race import write_lease
from tests.test_train import _environment, _flags, rows

ROW = {"step": 120_000, "loss": 2.34567, "lr": 3e-4, "grad_norm": 0.5, "loss_scale": 65536.0, "skipped_steps": 3,
       "tokens_per_second": 1_234_567.0, "mfu": 0.412, "tflops_per_device": 400.0, "memory_bytes": 2**36,
       "eta_seconds": 3723.0}
PROGRAM = """
from pretrain.terminal import Screen
with Screen() as screen:
    for step in range(1, 4):
        screen.status(f"step {step}, and more than the eighty characters that a line of this terminal has room for")
        if step != 2:
            screen.line(f"row {step}")
    screen.line("a note whose words do not fit on one line of this terminal, so that it is wrapped between two of them")
"""
SHOWN = ["row 1", "row 3", "a note whose words do not fit on one line of this terminal, so that it is",
         "  wrapped between two of them"]


def environment() -> dict[str, str]:
    return {**_environment(), "TERM": "xterm", "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}


def in_terminal(command: list[str], see: Callable[[int, str], None] = lambda terminal, written: None, *,
                columns: int = 80, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a command in the foreground of a new terminal, and return the exit code and the output.

    Whenever there is new output, `see` is called with the terminal and all output so far.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.chdir(cwd)
        os.execvpe(command[0], command, environment())
    timer = threading.Timer(240, os.kill, (pid, signal.SIGKILL))
    timer.start()
    written = b""
    try:
        while piece := _read(terminal):
            written += piece
            see(terminal, written.decode(errors="replace"))
    finally:
        timer.cancel()
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the last process with this terminal has ended
        return b""


def shown(written: str) -> list[str]:
    r"""Return the lines that a terminal shows at the end. Supports only \r and the control sequence ESC [K."""
    lines = []
    for line in written.split("\n"):
        cells = ""
        for part in re.split(r"(\r|\033\[K)", line.rstrip("\r")):
            cells = part if part not in ("\r", "\033[K", "") and not cells else cells + part
            cells = "" if part == "\033[K" else cells.replace("\r", "") if part == "\r" else cells
        lines.append(cells)
    return lines[:-1] if lines[-1] == "" else lines


@pytest.mark.parametrize("launcher", ["", "setsid --wait"])
def test_a_terminal_keeps_rows_above_one_status_line(launcher: str) -> None:
    """ds-pretrain starts ranks in a new session, as setsid does."""
    code, written = in_terminal([*launcher.split(), sys.executable, "-c", PROGRAM])
    assert code == 0, written
    assert shown(written) == SHOWN
    statuses = re.findall(r"\033\[K(step [^\r\n]*)", written)
    assert {status.split(",")[0] for status in statuses} == {"step 1", "step 2", "step 3"}
    assert {len(status) for status in statuses} == {79}


@pytest.mark.parametrize("kind", ["pipe", "a launcher's terminal", "a dumb terminal", "in the background"])
def test_no_control_characters_without_a_watched_terminal(kind: str) -> None:
    """Open MPI gives each rank a terminal that is not the terminal of the rank's session; see test_mpi.py."""
    if kind in ("a dumb terminal", "in the background"):
        command = ["env", "TERM=dumb", sys.executable, "-c", PROGRAM] if kind == "a dumb terminal" else \
            ["bash", "-c", 'exec 2>/dev/null; set -m; "$0" -c "$1" & wait', sys.executable, PROGRAM]
        code, written = in_terminal(command, columns=200)
        assert code == 0, written
    else:
        ours, theirs = pty.openpty() if kind != "pipe" else os.pipe()
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment(),
                                   start_new_session=True)
        os.close(theirs)
        written = ""
        while piece := _read(ours):
            written += piece.decode()
        os.close(ours)
        assert process.wait() == 0
    assert "\033" not in written
    assert written.replace("\r\n", "\n").splitlines() == [*SHOWN[:2], f"{SHOWN[2]} {SHOWN[3].strip()}"]


def test_a_closed_pipe_does_not_end_the_run() -> None:
    """In `ds-pretrain ... | tee log`, Ctrl-C ends tee, and the pipe is closed."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=theirs, stderr=subprocess.PIPE, env=environment(),
                          text=True)
    os.close(theirs)
    assert done.returncode == 0
    assert done.stderr == "warning: the output cannot be written (Broken pipe); the run continues without it\n"


def test_rows_fit_the_terminal() -> None:
    def line(columns: int | None, fp16: bool = False) -> str:
        return row_line(ROW, train_steps=500_000, fp16=fp16, columns=columns)

    assert line(None) == "step  120000/500000  loss 2.3457  lr 3.00e-04  grad norm 0.500  1,234,567 tokens/s  " \
                         "MFU 41.2%  64.0 GiB  ETA 1:02:03"
    assert line(200, fp16=True).count("scale 65536 (skipped 3)") == 1
    assert line(80).endswith("grad norm 0.500")
    assert all(len(line(columns)) <= columns for columns in range(40, 200))
    assert line(20).startswith("step  120000/500000  loss 2.3457")


def test_tables_of_text_fit_the_terminal(corpus: str, tmp_path: Path) -> None:
    check_table(f"check --deepspeed_config zero2_bf16 --model tiny --train_data {corpus} --train_steps 9 "
                "--seq_length 64 --save run", 11, tmp_path)


def check_table(program: str, indent: int, folder: Path) -> None:
    """Check that the output of a subcommand fits the terminal. The command that comes next is one line to copy."""
    code, text = in_terminal([sys.executable, "-m", "pretrain", *program.split()], cwd=folder)
    *lines, following = text.replace("\r\n", "\n").splitlines()
    assert code == 0, text
    assert following.startswith("next: ds-pretrain ")
    assert max(len(line) for line in lines) <= 80
    assert sum(line.startswith(" " * indent) for line in lines) >= 2


def test_ctrl_c_before_training_leaves_no_lock_and_lines_break_between_words(corpus: str, tmp_path: Path) -> None:
    """Ctrl-C to ds-pretrain releases the lock. The line of a start that finds a dead one's lock fits the terminal."""
    run, pressed = tmp_path / "run", False

    def press_ctrl_c(terminal: int, seen: str) -> None:
        nonlocal pressed
        if not pressed and "loading torch" in seen:
            pressed = True
            os.write(terminal, b"\x03")

    command = [sys.executable, "-m", "pretrain", "--num_gpus", "2",
               *_flags(corpus, Path("run"), "--train_steps", "5", config=ROOT / "ds_configs" / "zero1_bf16.json")]
    for finds_a_dead_start in (False, True):
        pressed = False
        code, written = in_terminal(command, press_ctrl_c, cwd=tmp_path)
        assert code == 130, written
        lines = shown(written)
        assert ("without releasing its lock" in " ".join(" ".join(lines).split())) == finds_a_dead_start, written
        lock = read_lease(run / LOCK)
        assert lock is not None
        assert lock.released
        write_lease(run / LOCK, lock.owner)  # as if this start had been killed
    at = next(at for at, line in enumerate(lines) if line.startswith("run: the earlier start has ended"))
    assert len(lines[at]) <= 80, lines
    assert lines[at + 1].startswith("  "), lines


def test_the_status_line_follows_the_speed_between_logged_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter without an engine: the last row is of step 10, at 2 steps a second; then the steps take 1, 2 and 3 s."""
    now, shown_lines = 100.0, list[str]()
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now)
    own: Any = meter.Meter.__new__(meter.Meter)
    length = SimpleNamespace(samples_between=lambda step, last, position: 8 * (last - step))
    own.plan = SimpleNamespace(args=SimpleNamespace(seq_length=100), train_steps=20, length=length)
    own.screen = SimpleNamespace(wants_status=lambda: True, status=shown_lines.append)
    own._since, own._batch_size = meter._SinceRow(10, 80, start=now), 8
    own.interval = meter.Interval(step=10, steps=1, step_seconds=0.5, consumed_samples=80, samples=8, batch_size=8,
                                   data_seconds=0.0, save_seconds=0.0, eval_seconds=0.0)
    for step, seconds in ((10, 0), (11, 1), (12, 2), (13, 3)):
        now += seconds
        own._step, own._consumed_samples = step, 8 * step
        own._show_progress(step)
    assert [(line.split()[2], line.split()[-1]) for line in shown_lines] == [
        ("1,600", "0:00:05"), ("800", "0:00:09"), ("533", "0:00:12"), ("400", "0:00:14")]


def test_ctrl_c_stops_a_run_in_a_terminal(corpus: str, tmp_path: Path) -> None:
    """The run is paused while Ctrl-C is pressed: the step in which it arrives is known, up to the log interval."""
    run, pressed_at = tmp_path / "run", 0

    def press_ctrl_c(terminal: int, seen: str) -> None:
        nonlocal pressed_at
        if not pressed_at and "/5000  loss" in seen.partition("step      12")[2]:
            process = psutil.Process(os.tcgetpgrp(terminal))
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            pressed_at = [row["step"] for row in rows(run) if "loss" in row][-1]
            os.write(terminal, b"\x03")
            process.resume()

    flags = _flags(corpus, Path("run"), "--train_steps", "5000", "--log_interval", "4", "--save_interval", "8",
                   "--async_save", config=ROOT / "ds_configs" / "zero1_bf16.json")
    code, written = in_terminal([sys.executable, str(ROOT / "pretrain" / "train.py"), *flags], press_ctrl_c,
                                cwd=tmp_path)
    lines = shown(written)
    print("\n".join(lines))
    assert code == 75, written
    assert sum(line.startswith("SIGINT: all ranks save after the current step") for line in lines) == 1
    steps = [row["step"] for row in rows(run) if "loss" in row]
    assert [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step ")] == steps
    assert all(len(line) <= 80 for line in lines)
    last = rows(run, "events.jsonl")[-1]["step"]
    assert 12 <= pressed_at <= last <= pressed_at + 2 * 4  # the current step ends within the first log interval
    saved = [re.fullmatch(r"saved run/checkpoints/global_step(\d+) \([\d.]+ MB, [\d.]+ s in the background\)", line)
             for line in lines if line.startswith("saved ")]
    assert [int(match[1]) for match in saved if match] == [*range(8, last, 8), last]
    assert lines[-1] == f"stopped by SIGINT: saved global_step{last}; the same command continues"
    assert re.search(r"\033\[Kstep \d+/5000  [\d,]+ tokens/s  ETA \d+:\d\d:\d\d", written)
