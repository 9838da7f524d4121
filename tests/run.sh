#!/usr/bin/env bash
# Set-up, ruff, mypy and the tests: tests/run.sh [pytest arguments]
#
# Without arguments also tests/pythons.sh --two: this environment's Python and another one of the machine, if it has one.
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh --dev
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
ruff check .
mypy
[ $# -gt 0 ] || tests/pythons.sh --two
exec pytest "$@"
