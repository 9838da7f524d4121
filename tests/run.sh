#!/usr/bin/env bash
# Set-up, ruff, mypy and the tests: tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
launch/setup.sh --dev
export PATH="${VENV:-$PWD/.venv}/bin:$PATH"
ruff check .
mypy
exec pytest "$@"
