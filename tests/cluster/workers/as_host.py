"""Run `PROGRAM ARGUMENTS` as rank RANK on a simulated host. HOSTS is a JSON list with the host of each rank.

Keys of a host: "namespace" (network namespace), "name", "setup" (shell command that runs first, in the network and
mount namespaces of the host), "path" (PATH of this command), "environ".
"""

import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


host = json.loads(os.environ["HOSTS"])[int(os.environ["RANK"])]
with open(f"/run/netns/{host['namespace']}") as namespace:
    check(libc.setns(namespace.fileno(), CLONE_NEWNET))
check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
socket.sethostname(host["name"])
subprocess.run(f"mount --make-rprivate / && {host['setup'] or 'true'}", shell=True, check=True,
               env={**os.environ, "PATH": host["path"]})
os.environ.update(host["environ"])
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
