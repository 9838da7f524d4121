#!/usr/bin/env bash
# Run set-up, ruff, mypy, import-linter and the tests: tests/run.sh [--all | pytest arguments]
#
# Without arguments: the tests that the change needs (tests/lanes.py); with --all: all except the slow ones. There is one
# process more than this machine has cores (at most 4).
# Tests of several ranks often wait: for a kill, a time-out or another host. One process per core leaves cores idle.
# With other arguments: `pytest ARGUMENTS` (for example: tests/run.sh -m slow).
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh --dev
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # thousands of processes would compile all modules, and pytest the tests in each of its own
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc would print OMP_NUM_THREADS instead of the number of cores
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # tests that run at the same time share the cores
ruff check .
types_and_imports() { mypy && lint-imports; }
if [ $# != 0 ] && [ "$1" != --all ]; then
    types_and_imports
    exec pytest "$@"
fi
status=0
printed=$(mktemp)
types_and_imports > "$printed" 2>&1 &  # while the first tests wait for their ranks
# shellcheck disable=SC2046  # words of the lane
pytest $(python -m tests.lanes "$@") -n $((cores < 3 ? cores + 1 : 4)) --dist loadfile --no-loadscope-reorder || status=$?
wait $! || status=1
cat "$printed"
rm "$printed"
echo "tests: $((SECONDS / 60)) min $((SECONDS % 60)) s on $cores cores, set-up included"
exit $status
