#!/usr/bin/env bash
# Train under mpirun (Open MPI, MPICH, Intel MPI): launch/mpi.sh [mpirun flags] -- [flags of pretrain/train.py]
#
#   launch/mpi.sh -np 2 -- --config run.yaml
#   launch/mpi.sh -np 16 --hostfile hosts -- --config run.yaml     # hosts in mpirun's own grammar
#   srun --mpi=pmix python pretrain/train.py --config run.yaml     # SLURM's MPI needs no mpirun
#
# Ranks come from the launcher's variables; on several hosts rank 0's address comes through mpi4py, unless MASTER_ADDR
# is set. MASTER_PORT is a free port of this host unless it is set. Variables for NCCL, gloo, torch and the like go
# along. MPIRUN names another mpirun. As root, which Open MPI refuses by default, its --allow-run-as-root is given: in a
# container everybody is root. mpirun passes a SIGUSR1 on: all ranks save and exit with 75.
set -euo pipefail
code=$(cd "$(dirname "$0")/.." && pwd)
export PATH="${VENV:-$code/.venv}/bin:$PATH"
die() { echo "launch/mpi.sh: $*" >&2; exit 2; }

flags=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do flags+=("$1"); shift; done
[ "${1:-}" = -- ] && [ $# -gt 1 ] ||
    die "found no flags of pretrain/train.py; expected launch/mpi.sh -np RANKS -- --config run.yaml"
shift
mpirun=${MPIRUN:-mpirun}
command -v "$mpirun" >/dev/null ||
    die "found no $mpirun; expected Open MPI's or MPICH's. Remedy: install one, or MPIRUN=/path/to/mpirun"

# Reject a run before mpirun starts: it prints ten lines about a rank that ends with an error.
ranks=
for ((i = 0; i < ${#flags[@]}; i++)); do
    case ${flags[i]} in
        -np | -n | -c | --np) ranks=${flags[i + 1]:-} ;;
        *host* | -H | -f) ranks= && break ;;  # other hosts may have other devices
    esac
done
[ -z "$ranks" ] || PYTHONPATH=$code python "$code/tools/check_config.py" --world_size "$ranks" "$@" > /dev/null || exit

export MASTER_PORT=${MASTER_PORT:-$(PYTHONPATH=$code python -c 'from pretrain.distributed.process import free_port
print(free_port())')}
travels='^(MASTER_|NCCL_|GLOO_|UCX_|OMP_|KMP_|MKL_|CUDA_|DS_|TORCH|HF_|PYTHON|PATH$|LD_LIBRARY_PATH$)'
names=$(compgen -e | grep -E "$travels")
case $("$mpirun" --version 2>&1) in
    *"Open MPI"* | *open-mpi*)
        if [ "$(id -u)" = 0 ] && [ -z "${OMPI_ALLOW_RUN_AS_ROOT:-}" ]; then
            echo "launch/mpi.sh: running as root: Open MPI gets its --allow-run-as-root" >&2
            export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        fi
        flags=(--bind-to none "${flags[@]}")  # it binds a rank to one core otherwise
        for name in $names; do flags=(-x "$name" "${flags[@]}"); done ;;
    *) flags=(-genvlist "$(echo $names | tr ' ' ,)" "${flags[@]}") ;;
esac
# each rank its share of the cores: with all of them, the ranks of a host would hinder one another
# shellcheck disable=SC2016
exec "$mpirun" "${flags[@]}" bash -c '
    share=$(($(nproc) / ${OMPI_COMM_WORLD_LOCAL_SIZE:-${MPI_LOCALNRANKS:-1}}))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
    exec "$@"' bash "$(command -v python)" -u "$code/pretrain/train.py" "$@"
