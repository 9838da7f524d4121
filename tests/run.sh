#!/usr/bin/env bash
# Set-up, ruff, mypy and the tests: tests/run.sh [pytest arguments]
#
# Without arguments: first the tests that mostly take one process, on every core (four at most), then those that start
# several ranks, one after another. Between the two, tests/pythons.sh --two: this environment's Python and another one of
# the machine, if it has one. With arguments: one pytest, as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh --dev
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
cores=$(env -u OMP_NUM_THREADS nproc)  # which that variable would limit
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # threads of one test would wait for the cores of another
ruff check .
mypy
lint-imports
[ $# = 0 ] || exec pytest "$@"
status=0
pytest -n $((cores < 4 ? cores : 4)) --dist loadfile --no-loadscope-reorder \
    --ignore tests/distributed --ignore tests/cluster || status=$?
tests/pythons.sh --two || status=$?
pytest tests/distributed tests/cluster || status=$?
echo "tests: $((SECONDS / 60)) min $((SECONDS % 60)) s on $cores cores, set-up included"
exit $status
