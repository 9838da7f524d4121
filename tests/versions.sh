#!/usr/bin/env bash
# Test other versions of Python and of the packages: tests/versions.sh [CELL...]; see tests/versions.py
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-$PWD/.venv}/bin/python
[ -x "$python" ] || python=python3  # cells with an environment of their own need no other one
exec "$python" -m tests.versions "$@"
