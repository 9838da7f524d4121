"""Start a module of this package in a child process, whatever files the working folder holds.

    python pretrain/child.py MODULE WORDS ...

`python -m MODULE` searches the working folder first, so that a `pretrain/` or a `json.py` of the user would replace
modules of this package and of the standard library. (Python 3.10 has no option against that but -I, which also drops
PYTHONPATH.) Modules of the user's own code are found in the working folder all the same: see own_code.py.

Each Python process that this package starts gets its command from `child_command`, names an absolute file, or begins
its program with WITHOUT_WORKING_FOLDER. Guarded by tests/test_child.py.
"""

import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# the first line of a program for `python -c`, or for the standard input of `python -`
WITHOUT_WORKING_FOLDER = "import sys; sys.path[:] = [folder for folder in sys.path if folder]\n"


def child_command(module: str, *words: str, options: tuple[str, ...] = (), python: str = sys.executable) -> list[str]:
    """Return the command that runs a module as a program. `options`: of Python."""
    return [python, *options, os.path.abspath(__file__), module, *words]


def _run() -> None:
    """Run the module that the first word names, as `python -m` does."""
    if getattr(sys.flags, "safe_path", False):  # python -P or PYTHONSAFEPATH: sys.path has no folder of this file
        sys.path.insert(0, _ROOT)
    else:
        sys.path[0] = _ROOT  # instead of pretrain/, whose modules would shadow others
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
