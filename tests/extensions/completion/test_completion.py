"""The scripts of `ds-pretrain completion` in a real bash and a real zsh."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.commands import COMMANDS
from pretrain.config.schedule import KINDS
from pretrain.memory.hardware import GPUS
from pretrain.shipped import TEMPLATES, layout_names
from tests.cluster.workers.packages import need_packages

ZERO3 = [name for name in layout_names() if name.startswith("zero3")]
# words of a command line, of which the last one is completed -> what is offered
OFFERED = {
    "che": sorted(name for name in COMMANDS if name.startswith("che")),
    "check --deepspeed_config zero3": ZERO3,
    "check --world_size 2 --deepspeed_config zero3": ZERO3,
    "--num_gpus 8 --deepspeed_config zero3": ZERO3,
    "--config run": ["run.yaml"],
    "check --config run.yaml --lr_sch": ["--lr_schedule"],
    "check --lr_schedule co": sorted(kind for kind in KINDS if kind.startswith("co")),
    "evaluate --num_acc": ["--num_accelerators"],
    "compare --model gpt2-": ["gpt2-large", "gpt2-medium", "gpt2-xl"],
    "compare --gpu h100": [name for name in sorted(GPUS) if name.startswith("h100")],
    "data s": ["split"],
    "checkpoint prune --keep_": ["--keep_best", "--keep_checkpoints", "--keep_every"],
    "config zero3": ZERO3,
    "template k8s": [name for name in TEMPLATES if name.startswith("k8s")],
    "completion z": ["zsh"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the scripts of both shells, and a file."""
    found = tmp_path_factory.mktemp("completion")
    (found / "run.yaml").touch()
    for shell, name in (("bash", "ds-pretrain"), ("zsh", "_ds-pretrain")):
        with open(found / name, "wb") as file:
            subprocess.run([sys.executable, "-m", "pretrain", "completion", shell], stdout=file, check=True)
    return found


def test_bash(folder: Path) -> None:
    lines = ["source ./ds-pretrain", "function_name=$(complete -p ds-pretrain | sed 's/.*-F \\([^ ]*\\).*/\\1/')"]
    for words in OFFERED:
        lines += [f"COMP_WORDS=(ds-pretrain {words}) COMP_CWORD={len(words.split())}",
                  "$function_name", 'echo "${COMPREPLY[*]}"']
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=True)
    offered = dict(zip(OFFERED, map(str.split, done.stdout.splitlines()), strict=True))
    assert {words: sorted(names) for words, names in offered.items()} == OFFERED


def test_zsh(folder: Path) -> None:
    need_packages("tests of completion", {"zsh": "zsh"})
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**os.environ, "TERM": "dumb", "COLUMNS": "100", "LINES": "100"})

    def read_until(*parts: str) -> None:
        text, deadline = "", time.monotonic() + 60
        while not all(part in text for part in parts):
            assert select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0], f"{parts}: {text}"
            text += os.read(terminal, 1 << 16).decode(errors="replace")

    try:
        os.write(terminal, b"fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D; echo $((6 * 7))_ready\n")
        read_until("42_ready")
        for words in ("check --deepspeed_config zero3", "che", "compare --model gpt2-", "checkpoint prune --keep_"):
            os.write(terminal, f"ds-pretrain {words}\t\t".encode())  # the second TAB lists the candidates
            read_until(*OFFERED[words])
            os.write(terminal, b"\x15")  # erases the line
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
