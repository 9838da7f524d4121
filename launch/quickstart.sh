#!/usr/bin/env bash
# Train a small model on a fresh machine: environment, corpus, tokenizer, training, summary, generated text.
#
#   launch/quickstart.sh [RUN_FOLDER]     (default: runs/quickstart)
#
# SETUP=done: skip launch/setup.sh and use the environment VENV.
# After the set-up, this is `ds-pretrain quickstart RUN_FOLDER`.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
run=$(realpath -m "${1:-$here/runs/quickstart}")
cd "$here"
[ "${SETUP:-}" = done ] || launch/setup.sh
VENV=${VENV:-$here/.venv}
export PATH="$VENV/bin:$PATH"
ds-pretrain quickstart "$run"
echo "(Activate the environment first: source $(printf %q "$VENV")/bin/activate)"
