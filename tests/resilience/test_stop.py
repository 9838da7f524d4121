"""SIGTERM to a rank whose sibling has crashed ends it; with all siblings alive it is a request. See test_saver.py for
signals to a real run."""

import os
import signal
import subprocess
import sys

from tests.support.launch import ROOT

# as DeepSpeed's launcher does: start the ranks, and send SIGTERM to those beside one that ended
LAUNCHER = """
import os, signal, subprocess, sys, time
RANK = '''
import signal, time
from pretrain.resilience.stop import _end_with_siblings
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
kept = _end_with_siblings()
print("ready", flush=True)
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    time.sleep(0.05)
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True) for _ in range(2)]
try:
    said = [rank.stdout.readline().strip() for rank in ranks]
    # a rank that was ready before the other one started does not watch: ask the last one
    last = ranks[1]
    last.send_signal(signal.SIGTERM)
    heard = last.stdout.readline().strip()
    alive = last.poll() is None
    ranks[0].kill()
    ranks[0].wait()
    last.send_signal(signal.SIGTERM)
    print(said, heard, alive, last.wait(timeout=900))
finally:
    for rank in ranks:
        rank.kill()
"""


def test_sigterm_after_a_crash_is_no_request() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=900,
                          env={**os.environ, "LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu",
                               "PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == f"['ready', 'ready'] heard True {128 + signal.SIGTERM}", done.stderr[-2000:]
