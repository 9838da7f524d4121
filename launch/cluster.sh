#!/usr/bin/env bash
# Train on several hosts: launch/cluster.sh --hostfile HOSTS [flags of `deepspeed`] -- FLAGS OF pretrain/train.py
#
# The script checks that each host can be reached and has the same environment, code, data and run folder. Then it
# chooses the network interface, writes RUN/.deepspeed_env and calls plain `deepspeed`. When a rank fails, the ranks on
# the other hosts are ended. On Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 all ranks save and exit with 75; a third signal ends
# them at once. --help lists the flags.
#
# VENV is the folder of the Python environment on every host (default: .venv in this checkout).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${VENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=$(command -v python3) ||
    { echo "launch/cluster.sh: Python is not installed. Remedy: launch/setup.sh" >&2; exit 2; }
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" "$root/pretrain/child.py" pretrain.cluster.multihost_launch "$@"
