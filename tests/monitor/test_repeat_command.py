"""The script that repeats a start: text of a foreign run.json is never code of the shell.

tests/distributed/checkpoint/test_steered_run.py runs such a script, and compares the losses.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from pretrain.monitor.repeat_command import command_of


def test_text_of_the_record_is_not_executed(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    texts = [f"$(touch {trap})", f"`touch {trap}`", f"x\ntouch {trap}", f"'; touch {trap}; '", f'"; touch {trap}; "',
             f"END_OF_FILE\ntouch {trap}"]
    program = tmp_path / "bin" / "ds-pretrain"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "repeated $*"\n')
    program.chmod(0o755)
    for text in texts:
        host = {"host": text, "ranks": text, "gpus": [], "cores": text, "cpu": text}
        record: dict[str, Any] = {
            "time": 0.0, "flags": {"save": text, "seed": text}, "deepspeed_config": {text: text},
            "model_config": {"model_type": text}, "layout": {"world_size": 2}, "hardware": [host, host],
            "git_commit": text, "code": {"diff": text}, "versions": {text: text},
            "environment": {text: text, "OMP_NUM_THREADS": text, "PATH": "/none"},
            "command": {"directory": str(tmp_path)}}
        script = tmp_path / "repeat.sh"
        script.write_text(command_of(record))
        for arguments in ([], [str(tmp_path / "new")]):
            done = subprocess.run(["sh", str(script), *arguments], capture_output=True, text=True, cwd=tmp_path,
                                  env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"})
            assert done.stdout.startswith("repeated --hostfile"), (text, done.stderr)
            assert not trap.exists(), text
