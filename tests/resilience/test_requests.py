"""SIGTERM ends a rank at once if another rank has crashed. Otherwise SIGTERM makes the run save and stop.

tests/distributed/checkpoint/test_saver.py tests signals to a real run.
"""

import os
import signal
import subprocess
import sys

from tests.support.launch import ROOT

# Starts two ranks and sends SIGTERM to the second rank twice: while the first rank is alive, and after the first rank
# was killed. After a crash, DeepSpeed's launcher also sends SIGTERM to the other ranks.
LAUNCHER = """
import os, signal, subprocess, sys, time
RANK = '''
import signal, time
from pretrain.resilience.requests import _exit_on_sigterm_after_crash
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
kept = _exit_on_sigterm_after_crash()
print("ready", flush=True)
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    time.sleep(0.05)
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) for _ in range(2)]
try:
    ready = [rank.stdout.readline().strip() for rank in ranks]
    # Signal the second rank: a rank that was ready before the other rank started does not watch the other rank.
    last = ranks[1]
    last.send_signal(signal.SIGTERM)
    request = last.stdout.readline().strip()
    alive = last.poll() is None
    ranks[0].kill()
    ranks[0].wait()
    last.send_signal(signal.SIGTERM)
    print(ready, request, alive, last.wait(timeout=900))
finally:
    for rank in ranks:
        rank.kill()
"""


def test_sigterm_ends_a_rank_only_after_a_crash() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=900,
                          env={**os.environ, "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
                               "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == f"['ready', 'ready'] SIGTERM True {128 + signal.SIGTERM}", done.stderr[-2000:]
