"""That memory stays, seen in page faults; in processes of their own, as nothing takes the setting back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
from pretrain.allocator import keep_freed_memory
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
    output = subprocess.run([sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[1], env=environment, check=True,
                            capture_output=True, text=True).stdout.split()
    pages = 10 * 2**24 // os.sysconf("SC_PAGE_SIZE")
    assert output[0] == str(not decided)
    assert (int(output[1]) > pages / 2) == decided
