"""A rank of test_measure_run.py that fails in a chosen way.

`failing_rank REQUEST.json`; the request is {"do": [way to fail of each rank]}.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(request: Path, rank: int) -> None:
    how = json.loads(request.read_text())["do"][rank]
    print(f"rank {rank}: begins", flush=True)
    if how == "abort":
        print("terminate called without an active exception", flush=True)
        os.abort()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "allocate":
        request.with_suffix(f".error.{rank}").write_text("RuntimeError: DefaultCPUAllocator: can't allocate memory")
        sys.exit(1)
    if how == "lose":  # as a rank that lost the connection to another rank
        time.sleep(0.5)
        request.with_suffix(f".error.{rank}").write_text("RuntimeError: Connection closed by peer")
        sys.exit(1)
    if how == "wait":
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
