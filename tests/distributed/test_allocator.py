"""Allocator settings keep freed memory in the process. The number of page faults shows this.

Each test starts new processes, because a process cannot undo these settings.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.distributed.process import is_out_of_memory, jemalloc_environment

RESTART = """
import os, sys
sys.path[0] = os.getcwd()
from pretrain.distributed.process import restart_with_jemalloc
restart_with_jemalloc()
print(os.getpid(), "jemalloc" in open("/proc/self/maps").read(), sys.flags.no_user_site, *sys.argv[1:])
"""
PROGRAM = """
import resource
from pretrain.distributed.process import keep_freed_memory
print(keep_freed_memory())
bytearray(b"1") * 2**24  # makes the heap grow once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytearray(b"1") * 2**24
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("set_by_user", [False, True])
def test_freed_memory_is_kept_unless_the_user_sets_malloc_variables(set_by_user):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    if set_by_user:
        environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_MMAP_MAX_"] = "65536"
    output = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], env=environment, check=True,
                            capture_output=True, text=True).stdout.split()
    pages = 10 * 2**24 // os.sysconf("SC_PAGE_SIZE")
    assert output[0] == str(not set_by_user)
    assert (int(output[1]) > pages / 2) == set_by_user


@pytest.mark.skipif(not jemalloc_environment({}), reason="no jemalloc on this machine")
@pytest.mark.parametrize("set_by_user", [{}, {"MALLOC_MMAP_MAX_": "65536"}, {"DS_ACCELERATOR": "cuda"}])
def test_a_program_restarts_with_jemalloc_under_the_same_process_id(set_by_user, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RESTART)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    with subprocess.Popen([sys.executable, "-s", str(program), "two words", "--x"], cwd=Path(__file__).parents[2],
                          env={**environment, "DS_ACCELERATOR": "cpu", **set_by_user}, stdout=subprocess.PIPE,
                          text=True) as process:
        output, _ = process.communicate()
    assert output.split(maxsplit=3) == [str(process.pid), str(not set_by_user), "1", "two words --x\n"]


def test_a_program_inside_another_process_is_not_restarted(tmp_path):
    """In a fork of a server, a restart would run the server's command line instead of the program's."""
    program = tmp_path / "program.py"
    program.write_text(RESTART)
    server = f"import os, runpy, sys; sys.argv = [os.environ['PROGRAM'], 'x']; runpy.run_path({str(program)!r})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    output = subprocess.run([sys.executable, "-c", server], cwd=Path(__file__).parents[2], check=True, text=True,
                            env={**environment, "DS_ACCELERATOR": "cpu", "PROGRAM": str(program)},
                            capture_output=True).stdout
    assert output.split()[1:] == ["False", "0", "x"]


@pytest.mark.parametrize(("error", "is_memory"), [
    (MemoryError(), True), (OSError(12, "Cannot allocate memory"), True),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (RuntimeError("std::bad_alloc"), True),
    (RuntimeError("shapes do not match"), False), (OSError(28, "No space left on device"), False)])
def test_out_of_memory_errors_are_recognized(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
