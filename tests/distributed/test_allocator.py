"""That memory stays, seen in page faults; in processes of their own, as nothing takes the setting back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.distributed.allocator import jemalloc_environment

RESTART = """
import os, sys
sys.path[0] = os.getcwd()
from pretrain.distributed.allocator import restart_with_jemalloc
restart_with_jemalloc()
print(os.getpid(), "jemalloc" in open("/proc/self/maps").read(), sys.flags.no_user_site, *sys.argv[1:])
"""
PROGRAM = """
import resource
from pretrain.distributed.allocator import keep_freed_memory
print(keep_freed_memory())
bytearray(b"1") * 2**24  # the heap grows once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    bytearray(b"1") * 2**24
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize("decided", [False, True])
def test_what_is_freed_is_not_faulted_in_again_unless_the_environment_decides(decided):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    if decided:
        environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_MMAP_MAX_"] = "65536"
    output = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[2], env=environment, check=True,
                            capture_output=True, text=True).stdout.split()
    pages = 10 * 2**24 // os.sysconf("SC_PAGE_SIZE")
    assert output[0] == str(not decided)
    assert (int(output[1]) > pages / 2) == decided


@pytest.mark.skipif(not jemalloc_environment({}), reason="no jemalloc on this machine")
@pytest.mark.parametrize("decided", [{}, {"MALLOC_MMAP_MAX_": "65536"}, {"DS_ACCELERATOR": "cuda"}])
def test_a_program_starts_anew_with_jemalloc_as_the_same_process(decided, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RESTART)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    with subprocess.Popen([sys.executable, "-s", str(program), "two words", "--x"], cwd=Path(__file__).parents[2],
                          env={**environment, "DS_ACCELERATOR": "cpu", **decided}, stdout=subprocess.PIPE,
                          text=True) as process:
        output, _ = process.communicate()
    assert output.split(maxsplit=3) == [str(process.pid), str(not decided), "1", "two words --x\n"]


def test_a_program_within_another_process_is_not_started_anew(tmp_path):
    """As forks of a server run programs: the command line is the server's."""
    program = tmp_path / "program.py"
    program.write_text(RESTART)
    server = f"import os, runpy, sys; sys.argv = [os.environ['PROGRAM'], 'x']; runpy.run_path({str(program)!r})"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "LD_PRELOAD"))}
    output = subprocess.run([sys.executable, "-c", server], cwd=Path(__file__).parents[2], check=True, text=True,
                            env={**environment, "DS_ACCELERATOR": "cpu", "PROGRAM": str(program)},
                            capture_output=True).stdout
    assert output.split()[1:] == ["False", "0", "x"]
