"""Start commands as forks of a process that has imported torch, DeepSpeed and transformers once.

A rank spends 1.5 to 4 s of CPU time on these imports, and a fork 0.03 s. The warm process imports all modules of this
package, without a thread and without touching a device. For each request at its Unix socket it forks a child that
behaves like `python COMMAND`: with the arguments, working folder, environment and open files of the request. It ends,
with all children, when its standard input is closed.

A child differs from a process of its own in what was fixed by the imports: variables that libraries read while they are
imported (READ_AT_IMPORT has those that runs use), the allocator (`restart_with_jemalloc` does nothing in a fork), and
its parent, which is the warm process. Guarded by tests/cluster/test_warm_process.py.
"""

import contextlib
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pretrain
from pretrain.child import child_command
from pretrain.distributed.process import end_process, importing

READ_AT_IMPORT = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "HF_HOME", "LD_PRELOAD", "PYTHONPATH")
_COMMAND = child_command("pretrain.cluster.warm_process")


@dataclass(frozen=True)
class WarmChild:
    """A command that runs in a fork of the warm process. If its connection is closed, the fork is killed."""

    pid: int
    connection: socket.socket
    answers: Any

    def wait(self) -> int:
        """Wait for the end. Returns the exit code, or -N after signal N. Raises ValueError if the warm process ends."""
        code: int = json.loads(self.answers.readline())["code"]
        self.connection.close()
        return code

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the command has ended."""
        return self.connection.fileno()


def warm_process(path: str, *modules: str, environ: Mapping[str, str], command: Sequence[str] = _COMMAND,
                 **settings: Any) -> subprocess.Popen[bytes]:
    """Start a warm process that listens at a new path. Requests wait until it has imported everything."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)  # only this user may connect
        listener.listen(128)
        return subprocess.Popen([*command, str(listener.fileno()), *modules], env=environ, stdin=subprocess.PIPE,
                                pass_fds=[listener.fileno()], start_new_session=True, **settings)


def start(path: str, command: Sequence[str], *, cwd: str, environ: Mapping[str, str], same_imports: bool = False,
          files: Sequence[int] = (0, 1, 2)) -> WarmChild | None:
    """Start `python COMMAND` with the given stdin, stdout and stderr. Raises OSError if no warm process listens.

    With `same_imports`, returns None if a variable of READ_AT_IMPORT has another value than in the warm process.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    answers = connection.makefile()
    warm = json.loads(answers.readline())
    if same_imports and not all(environ.get(name) in values for name, values in warm.items()):
        connection.close()
        return None
    socket.send_fds(connection, [b"\n"], files)
    _send(connection, {"command": [*command], "cwd": cwd, "environ": dict(environ)})
    return WarmChild(json.loads(answers.readline())["pid"], connection, answers)


def import_all(modules: Sequence[str]) -> None:
    """Import the libraries, all modules of this package, and `modules`. Raises RuntimeError if one starts a thread."""
    from pretrain.distributed.device import detect_device
    from pretrain.distributed.requirements import check_requirements
    from pretrain.engine.prepare import prepare_deepspeed

    with importing():
        check_requirements()
        prepare_deepspeed(detect_device())
        for name in ("transformers", *(found.name for found in pkgutil.walk_packages(pretrain.__path__, "pretrain.")
                                       if not found.name.endswith(".__main__")), *modules):
            importlib.import_module(name)
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]  # torch's: 30 ms at the end of a fork
        finalizer.atexit = False
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"the imported modules have started {threads - 1} threads, which forks would not have")


def _run(command: list[str]) -> int:
    """Run `python [-u] COMMAND` in this process, and return its exit code."""
    is_unbuffered = command[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    command = command[command[0] == "-u":]
    if is_unbuffered:  # write_through alone would pass the text on to a buffer
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), sys.stdout.encoding, sys.stdout.errors,
                                      write_through=True)
    else:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    is_module, is_text = command[0] == "-m", command[0] == "-c"
    sys.argv = ["-c", *command[2:]] if is_text else command[is_module:]
    sys.path[0] = "" if is_text else os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    try:
        if is_text:
            exec(command[1], {"__name__": "__main__"})
        elif is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the client has ended
        connection.sendall(json.dumps(value).encode() + b"\n")


class _Server:
    """Forks a child for each connection, and answers with its process id and, when it has ended, its exit code."""

    def __init__(self, listener: socket.socket, environ: dict[str, list[str | None]]) -> None:
        self.environ, self.listener, self.children = environ, listener, set[int]()
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, self.end)

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self.selector.select():
                if key.fileobj in self.selector.get_map():  # not closed by an earlier event
                    key.data()

    def end(self) -> NoReturn:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        _send(connection, self.environ)
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        if not (request := connection.makefile().readline()):  # the client has another environment
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._become(json.loads(request), files)
        for file in files:
            os.close(file)
        _send(connection, {"pid": pid})
        ended = os.pidfd_open(pid)
        self.children.add(pid)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.kill(pid, connection))
        self.selector.register(ended, selectors.EVENT_READ, lambda: self.report(pid, ended, connection))

    def kill(self, pid: int, connection: socket.socket) -> None:
        os.kill(pid, signal.SIGKILL)  # its client has gone
        self.selector.unregister(connection)

    def report(self, pid: int, ended: int, connection: socket.socket) -> None:
        """Send the exit code of a child that has ended."""
        self.children.remove(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self.selector.unregister(ended)
        os.close(ended)
        if connection in self.selector.get_map():
            self.selector.unregister(connection)
            _send(connection, {"code": code})
        connection.close()

    def _become(self, request: dict[str, Any], files: list[int]) -> NoReturn:
        """Turn this fork into the process of a request, and run its command."""
        code = 1
        try:
            os.setpgid(0, 0)  # a signal to its group must not end the warm process
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            for descriptor in {key.fd for key in self.selector.get_map().values()} - {0}:
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environ"])
            os.chdir(request["cwd"])
            code = _run(request["command"])
        except BaseException:
            traceback.print_exc()
        end_process(code)


if __name__ == "__main__":
    before = {name: os.environ.get(name) for name in READ_AT_IMPORT}
    import_all(sys.argv[2:])  # may set these variables
    environs = {name: [value, os.environ.get(name)] for name, value in before.items()}
    _Server(socket.socket(fileno=int(sys.argv[1])), environs).serve()
