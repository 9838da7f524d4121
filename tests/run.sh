#!/usr/bin/env bash
# Run set-up, ruff, mypy, import-linter and the tests: tests/run.sh [pytest arguments]
#
# Without arguments:
# 1. the tests that mostly need one process, in parallel on up to four cores;
# 2. tests/pythons.sh --two, which tests a second Python if the machine has one;
# 3. the tests that start several ranks, one after another.
# With arguments: `pytest ARGUMENTS` (for example: tests/run.sh -m slow).
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh --dev
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc would print OMP_NUM_THREADS instead of the number of cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # tests that run at the same time share the cores
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
