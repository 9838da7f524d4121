"""Start the ranks of tests as forks of one process that has imported all modules. A fork starts in 1 s instead of 8 s.

Each line of standard input is a request {"command", "environs" (one per rank), "cwd", "timeout"}. Each answer is a line
on standard output: {"codes": exit codes} or {"timeout": true}. Each rank is a new process that behaves like
`python COMMAND` and writes its output to CWD/rankN.log.
"""

import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch._inductor.compile_fx  # noqa: F401
import transformers.hf_argparser  # noqa: F401 (takes a second to import)

from pretrain.distributed.device import detect_device
from pretrain.distributed.requirements import check_requirements
from pretrain.engine.prepare import prepare_deepspeed

GRACE_S = 60.0  # after one rank has failed, the other ranks have this time to report their errors


def load_operators() -> None:
    """Load the compiled operators, and check the installed packages, once. Forks inherit both."""
    check_requirements()
    prepare_deepspeed(detect_device())
    from deepspeed.accelerator import get_accelerator

    import pretrain.trainer  # noqa: F401

    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder"):
        if get_accelerator().create_op_builder(name).is_compatible(verbose=False):
            get_accelerator().create_op_builder(name).load(verbose=False)


def run_command(command: list[str], environ: dict[str, str], log: Path) -> int:
    """Run `python COMMAND` in this process, and return its exit code."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(log.parent)
    try:
        if command[0] == "-c":
            sys.argv = ["-c", *command[2:]]
            exec(command[1], {"__name__": "__main__"})
        else:
            sys.argv = command
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(command: list[str], environ: dict[str, str], log: Path) -> int:
    """Fork one rank, and return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run_command(command, environ, log)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def run_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks. GRACE_S after a failure, kill the remaining ranks, because they wait for the failed rank."""
    cwd, deadline = Path(request["cwd"]), time.monotonic() + request["timeout"]
    running = {fork(request["command"], environ, cwd / f"rank{rank}.log"): rank
               for rank, environ in enumerate(request["environs"])}
    codes = [0] * len(running)
    timeout = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        elif time.monotonic() > deadline:
            timeout = not any(codes)
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return {"timeout": True} if timeout else {"codes": codes}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print write to stderr; stdout has only answers
    load_operators()
    gc.freeze()  # exclude imported modules from DeepSpeed's frequent garbage collections
    for line in sys.stdin:
        print(json.dumps(run_request(json.loads(line))), file=answers, flush=True)
