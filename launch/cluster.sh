#!/usr/bin/env bash
# Trains on several hosts: launch/cluster.sh --hostfile HOSTS [flags of `deepspeed`] -- FLAGS OF pretrain/train.py
#
# Checks that each host can be reached and has the same environment, code, data and run folder, chooses the network
# interface, writes RUN/.deepspeed_env and calls plain `deepspeed`. When a rank fails, what remains on other hosts is
# ended. SIGUSR1 or SIGTERM: all ranks save and exit with 75. --help lists the flags.
#
# VENV names the environment's folder (default: .venv in this checkout), on every host.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${VENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=$(command -v python3) || { echo "launch/cluster.sh: no Python. Remedy: launch/setup.sh" >&2; exit 2; }
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pretrain.cluster.multihost_launch "$@"
