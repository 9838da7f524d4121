#!/usr/bin/env bash
# Train under mpirun (Open MPI, MPICH, Intel MPI): launch/mpi.sh [mpirun flags] -- [flags of the run]
#
#   launch/mpi.sh -np 2 -- --config run.yaml
#   launch/mpi.sh -np 16 --hostfile hosts -- --config run.yaml     # a hostfile in mpirun's own format
#   srun --mpi=pmix python -m pretrain.train --config run.yaml     # under SLURM, without mpirun and without this script
#
# pretrain/train.py reads rank numbers from the launcher's variables. On several hosts it gets rank 0's address through
# mpi4py, unless MASTER_ADDR is set. MASTER_PORT defaults to a port that is free on this host. The variables of NCCL,
# gloo, torch and others are passed on to all ranks. MPIRUN names another mpirun. By default Open MPI does not start
# programs as root. This script allows it, because in a container every process is root.
#
# Ctrl-C, SIGTERM, SIGHUP, SIGUSR1: all ranks save and exit with 75. A second signal changes nothing, a third one ends the
# run at once. The script sends SIGUSR1 to mpirun, which passes it on. On Ctrl-C or SIGTERM, mpirun itself would kill the
# ranks after a second.
set -euo pipefail
code=$(cd "$(dirname "$0")/.." && pwd)
if [ -f "$code/pretrain/train.py" ]; then
    export PATH="${VENV:-$code/.venv}/bin:$PATH" PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
else  # `ds-pretrain template mpi` printed this script: the package is installed
    export PATH="${VENV:+$VENV/bin:}$PATH"
fi
die() { echo "launch/mpi.sh: $*" >&2; exit 2; }
# not with `python -m`, which would import what lies in the working folder
package=$(cd / && python -c 'import pretrain; print(pretrain.__path__[0])' 2>/dev/null) ||
    die "python finds no package ds-pretrain. Remedy: activate its environment, or set VENV=ITS_FOLDER"

flags=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
[ "${1:-}" = -- ] && [ $# -gt 1 ] ||
    die "the flags of pretrain/train.py are missing. Remedy: launch/mpi.sh -np RANKS -- --config run.yaml"
shift
mpirun=${MPIRUN:-mpirun}
command -v "$mpirun" >/dev/null ||
    die "$mpirun is not installed. Remedy: install Open MPI or MPICH, or set MPIRUN=/path/to/mpirun"

# Validate the run before mpirun starts, because mpirun prints ten lines about each rank that ends with an error.
ranks=
for ((i = 0; i < ${#flags[@]}; i++)); do
    case ${flags[i]} in
        -np | -n | -c | --np) ranks=${flags[i + 1]:-} ;;
        *host* | -H | -f) ranks= && break ;;  # no validation: the other hosts may have other devices
    esac
done
[ -z "$ranks" ] || python "$package/__main__.py" check --world_size "$ranks" "$@" > /dev/null || exit

export MASTER_PORT=${MASTER_PORT:-$(cd / && python -c 'from pretrain.distributed.process import free_port
print(free_port())')}
export DS_PRETRAIN_SECRET=${DS_PRETRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}  # pretrain/pages/launch.md
forwarded='^(MASTER_|NCCL_|GLOO_|UCX_|OMP_|KMP_|MKL_|CUDA_|DS_|TORCH|HF_|PYTHON|PATH$|LD_LIBRARY_PATH$)'
names=$(compgen -e | grep -E "$forwarded")
case $("$mpirun" --version 2>&1) in
    *"Open MPI"* | *open-mpi*)
        if [ "$(id -u)" = 0 ] && [ -z "${OMPI_ALLOW_RUN_AS_ROOT:-}" ]; then
            echo "launch/mpi.sh: running as root: allowing Open MPI to run as root" >&2
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        fi
        flags=(--bind-to none "${flags[@]}")  # Open MPI binds each rank to one core by default
        for name in $names; do flags=(-x "$name" "${flags[@]}"); done ;;
    *) flags=(-genvlist "$(echo $names | tr ' ' ,)" "${flags[@]}") ;;
esac
signals=0 last=0 ended=
handle() { # handle NAME NUMBER: the same rule as in pretrain/resilience/signals.py
    [ -n "${!:-}" ] || exit $((128 + $2))  # mpirun has not started
    [ $signals = 0 ] || [ "$1" = INT ] || [ $((SECONDS - last)) -ge 5 ] || return 0
    signals=$((signals + 1)) last=$SECONDS
    case $signals in
        1) kill -USR1 $! || true ;;
        2) echo "launch/mpi.sh: SIG$1: the run is about to save and stop; the next signal ends it at once" >&2 ;;
        *) echo "launch/mpi.sh: SIG$1: ended at once, without waiting for the save" >&2
           ended=$((128 + $2))
           kill -TERM $! || true ;;
    esac
}
trap 'handle HUP 1' HUP; trap 'handle INT 2' INT; trap 'handle USR1 10' USR1; trap 'handle TERM 15' TERM
# Divide the cores among the ranks of a host: with threads on all cores, the ranks would slow each other down.
# shellcheck disable=SC2016
setsid "$mpirun" "${flags[@]}" bash -c '
    threads=$(($(nproc) / ${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    exec "$@"' bash "$(command -v python)" -u "$package/train.py" "$@" &
while kill -0 $! 2>/dev/null; do wait $! && code=0 || code=$?; done  # a signal ends `wait` while the ranks still run
wait $! && code=0 || code=$?
exit "${ended:-$code}"
