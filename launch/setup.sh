#!/usr/bin/env bash
# Set up a Python environment for this checkout: launch/setup.sh [--offload] [--dev]
#
#   --offload  also compile DeepSpeed's operators for offload to host memory and NVMe (needs Debian's libaio-dev).
#              Without this flag, the first run that needs such an operator compiles it.
#   --dev      do what --offload does, and install the packages of the tests (pytest, ruff, mypy, tensorboard ...)
#
# VENV is the folder of the environment (default: .venv in the checkout). PYTHON is the interpreter (default: python3).
# CONSTRAINTS is the file of versions (default: launch/constraints.txt).
# The script can be run again: it skips steps that are up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-$PWD/.venv}
constraints=${CONSTRAINTS:-launch/constraints.txt}
start=$SECONDS
dev= offload=
for word in "$@"; do
    case $word in
        --offload) offload=1 ;;
        --dev) dev=1 offload=1 ;;
        *) echo "launch/setup.sh: $word: there is no such flag; the flags are --offload and --dev" >&2; exit 2 ;;
    esac
done

say() { printf '\033[1m[set-up] %s\033[0m\n' "$*"; }
die() { echo "launch/setup.sh: $*" >&2; exit 2; }

# Install a Debian package if this user is root; otherwise print the command that installs it, and exit.
need() { # need PACKAGE COMMAND..., where COMMAND succeeds if the package is installed
    local package=$1; shift
    "$@" >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Debian package $package"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
    else
        die "the Debian package $package is missing. Remedy: sudo apt-get install $package"
    fi
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "$python is not installed. Remedy: sudo apt-get install python3"
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
    die "$python is $("$python" --version); Python 3.10 to 3.13 is needed. Remedy: PYTHON=/path/to/python3.1x $0"
need g++ command -v c++
need python3-venv "$python" -c 'import ensurepip, venv'
need python3-dev "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
[ -z "$offload" ] || need libaio-dev test -e /usr/include/libaio.h

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
# jemalloc is optional. On CPUs a training step needs a fifth less memory with jemalloc than with glibc's malloc.
has_gpu || ( need libjemalloc2 sh -c '/sbin/ldconfig -p | grep -q libjemalloc.so.2' ) ||
    say "continuing without jemalloc"
want="$(cat "$constraints" pyproject.toml | sha256sum | cut -c1-16) gpu=$(has_gpu && echo 1 || true) $PWD"
stamp=$VENV/.ds-pretrain-setup
case $(cat "$stamp" 2>/dev/null) in
    "$want dev") ready=1 ;;
    "$want") ready=${dev:+0} ready=${ready:-1} ;;
    *) ready=0 ;;
esac
if [ $ready = 1 ]; then
    say "environment $VENV is up to date"
else
    [ -x "$VENV/bin/python" ] || { say "environment $VENV"; "$python" -m venv "$VENV"; }
    quiet=-q; [ ! -t 1 ] || quiet=
    pip() { "$VENV/bin/python" -m pip install $quiet --disable-pip-version-check -c "$constraints" "$@"; }
    pip setuptools wheel ninja hatchling editables
    torch=$(grep '^torch==' "$constraints" || echo torch)
    if has_gpu; then
        say "PyTorch for NVIDIA GPUs ($torch)"
        pip "$torch"
    else
        say "PyTorch for CPUs ($torch+cpu, or the general build if pip does not find it)"
        pip "$torch+cpu" 2>/dev/null || pip "$torch"
    fi
    say "DeepSpeed, transformers and this package"
    pip --no-build-isolation -e ".${dev:+[dev,monitors]}"
    echo "$want${dev:+ dev}" > "$stamp"
fi
say "packages installed in $((SECONDS - start)) s"
export PATH="$VENV/bin:$PATH"
cache=${TORCH_EXTENSIONS_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/torch_extensions}
say "compiling DeepSpeed's operators (once; cached in $cache)"
before=$SECONDS
"$VENV/bin/python" pretrain/child.py pretrain.engine.build_ops ${offload:+--offload}
say "operators compiled in $((SECONDS - before)) s"
