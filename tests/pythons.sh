#!/usr/bin/env bash
# Test the package with each Python of this machine: save, resume, generate, convert and consolidate with real engines
# on 2 ranks. Each Python also reads the checkpoints of the others. Prints one row per Python. The exit code is 1 if a
# Python fails.
#
#   tests/pythons.sh [--two] [PYTHON...]
#
# Without arguments: the Python of the environment (VENV, default .venv), /usr/bin/python3, python3.1x on PATH and the
# versions of pyenv, one of each version. --two: the environment's Python and one other. The other one is
# /usr/bin/python3 if its version differs.
#
# A Python of the same minor version as the environment's (3.11.2 and 3.11.7) uses its packages and compiled operators.
# For other versions, launch/setup.sh creates environments in the folder PYTHONS (default ~/.cache/ds-pretrain/pythons).
# An environment takes about 5 GB if pip finds no CPU build of torch. RUNS is the folder for runs and logs (default: a
# temporary folder, removed unless a Python fails).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export VENV=${VENV:-$root/.venv}
PYTHONS=${PYTHONS:-${XDG_CACHE_HOME:-$HOME/.cache}/ds-pretrain/pythons}
say() { echo "[pythons] $*" >&2; }
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

two=
[ "${1:-}" != --two ] || { two=1; shift; }
[ -x "$VENV/bin/python" ] || { echo "tests/pythons.sh: $VENV has no Python. Remedy: launch/setup.sh" >&2; exit 2; }
if [ $# -gt 0 ]; then
    candidates=("$@")
else
    candidates=("$VENV/bin/python" /usr/bin/python3)
    for minor in 10 11 12 13; do candidates+=("$(command -v "python3.$minor" || true)"); done
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3)
fi

own=$(version_of "$VENV/bin/python")
declare -A pythons=()
versions=()
for python in "${candidates[@]}"; do
    if ! version=$(version_of "$python"); then
        [ $# = 0 ] || { echo "tests/pythons.sh: cannot run $python" >&2; exit 2; }
        continue
    fi
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || continue
    [ -z "${pythons[$version]:-}" ] || continue
    pythons[$version]=$python
    versions+=("$version")
done
if [ -n "$two" ]; then
    other=${versions[1]:-}
    [ -n "$other" ] || { say "this machine has no other Python than $own: nothing to test"; exit 0; }
    if [ "${pythons[$other]}" != /usr/bin/python3 ]; then  # prefer a Python that needs no environment of 5 GB
        for version in "${versions[@]:1}"; do
            [ "${version%.*}" != "${own%.*}" ] || { other=$version; break; }
        done
    fi
    versions=("$own" "$other")
fi

# environment VERSION INTERPRETER: create an environment if one is needed, and print the path of its Python.
environment() {
    local folder=$PYTHONS/$1
    if [ "$1" = "$own" ]; then
        echo "$VENV/bin/python"
    elif [ "${1%.*}" = "${own%.*}" ]; then
        "$2" -m venv --without-pip --clear "$folder"
        local packages
        packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "import site; site.addsitedir('$packages')" > "$folder/lib/python${1%.*}/site-packages/shared.pth"
        echo "$folder/bin/python"
    else
        PYTHON=$2 VENV=$folder launch/setup.sh >&2 || return 1
        echo "$folder/bin/python"
    fi
}

arguments=()
for version in "${versions[@]}"; do
    say "environment for Python $version (${pythons[$version]})"
    python=$(environment "$version" "${pythons[$version]}") || python=none
    arguments+=("$version=$python")
done
exec "$VENV/bin/python" tests/pythons.py ${RUNS:+--runs "$RUNS"} "${arguments[@]}"
