"""The documentation pages, their commands, and the test of each command that test_quickstart.py does not run."""

import re
from pathlib import Path

from tests.support.launch import ROOT

README = ROOT / "README.md"
# The commands run in this order. A page may use the files that earlier pages created.
PAGES = [README, *(ROOT / name for name in (
    "launch/first_run.md",
    "tools/README.md", "tools/data.md", "tools/training_data.md", "tools/weights.md", "tools/memory.md",
    "tools/checkpoints.md", "tools/evaluation.md", "tools/gpu.md", "tools/performance.md", "tools/measurements.md",
    "tools/metrics.md", "tools/report.md", "tools/sanity_check.md",
    "ds_configs/README.md", "ds_configs/recipe.md", "ds_configs/long_sequences.md", "ds_configs/pipelines.md",
    "ds_configs/parallelism.md",
    "launch/README.md", "launch/unattended.md", "launch/right_results.md",
    "pretrain/README.md", "tests/README.md"))]

_PROGRAMS = (r"(?:python|deepspeed|ds-pretrain|torchrun|srun|sbatch|mpirun|kubectl|pip|pytest|\w+/[\w/]+\.sh|"
             r"tools/\w+\.py)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# Commands that tests/test_quickstart.py does not run -> (file that runs the same program, text in this file).
COVERED: dict[str, tuple[str, str]] = {
    "launch/quickstart.sh": ("tests/test_quickstart.py", '"launch/quickstart.sh"'),
    "source .venv/bin/activate": ("tests/test_quickstart.py", "source .venv/bin/activate; "),
    "tests/run.sh": (".ci/run", "tests/run.sh"),
    "tests/run.sh tests/config -k schedule": ("tests/run.sh", 'exec pytest "$@"'),
    "tests/pythons.sh": ("tests/test_pythons.py", '"tests/pythons.sh", "--two"'),
    "launch/setup.sh": ("tests/run.sh", "launch/setup.sh --dev"),  # --dev does more
    "launch/setup.sh --dev": ("tests/run.sh", "launch/setup.sh --dev"),
    "launch/setup.sh --offload": ("tests/run.sh", "launch/setup.sh --dev"),  # --dev includes --offload
    "ruff check .": ("tests/run.sh", "ruff check ."),
    "mypy": ("tests/run.sh", "mypy"),
    "lint-imports": ("tests/run.sh", "lint-imports"),
    # benchmarks: the tests run the same sections with a smaller model
    "python tools/bench.py --preset cpu-small --rounds 2": ("tests/bench/test_bench.py", '"--preset", "cpu-small"'),
    **{f"python tools/bench.py --what {words} --write tools/measurements.md":
       ("tests/bench/test_bench.py", "test_the_page_has_the_markers_of_its_commands") for words in (
           *(f"step,profile --preset {preset}" for preset in ("cpu", "cpu-2048", "cpu-llama", "cpu-llama-2048")),
           "overhead,checkpoint,startup")},
    **{f"tools/bench.py --what {section}":
       ("tests/bench/test_bench.py", '"overhead,checkpoint,startup,data"')
       for section in ("overhead", "checkpoint", "startup", "data")},
    "python tools/bench.py --recompute attention": ("tests/bench/test_bench.py", '"--recompute", "attention"'),
    # GPUs: without one, the tests run the same sections and programs with a smaller model
    **{f"python tools/bench.py --preset {preset}": ("tests/bench/test_bench.py", '"--preset", "cpu-small"')
       for preset in ("h200-gpt3-1.3b", "h200-gpt3-1.3b --compile_blocks true", "h200-llama-1b --compile_blocks true")},
    "tools/bench.py --compile_blocks true": ("tests/model/test_operators.py", "compile_blocks(module"),
    "python -m pretrain.engine.build_ops": ("launch/setup.sh", "-m pretrain.engine.build_ops"),
    "python tools/report.py runs/quickstart --watch": ("tests/analysis/report/runs.py", '"--watch"'),
    # evaluation: the tests use another task, without a download, and start the ranks themselves
    "python tools/evaluate.py runs/quickstart --tasks hellaswag,arc_easy --num_fewshot 5 --limit 200":
        ("tests/analysis/test_evaluate.py", '"--tasks"'),
    "ds-pretrain --num_accelerators 2 tools/evaluate.py runs/quickstart --partition_weights":
        ("tests/analysis/test_evaluate.py", '"--partition_weights", "--local_rank=0", ranks=2'),
    # ramp-up: the tests train with other batches
    "ds-pretrain --num_accelerators 2 --config launch/quickstart.yaml --batch_schedule 0:4,2e4:8,1e5:16 "
    "--save runs/ramp":
        ("tests/distributed/test_inspect_data.py", '"batch_schedule"'),
    # sanity checks: the tests run the same programs with a smaller model
    "ds-pretrain --num_accelerators 2 tools/sanity_check.py --config launch/quickstart.yaml --save runs/checked":
        ("tests/distributed/test_sanity.py", '"sanity_check.py"'),
    "ds-pretrain --num_accelerators 2 --config launch/quickstart.yaml --sanity_check --save runs/checked":
        ("tests/distributed/test_sanity.py", '"--sanity_check"'),
    "ds-pretrain --num_accelerators 2 tools/find_lr.py --from 1e-6 --to 1 --steps 100 --plot runs/lr.svg "
    "--config launch/quickstart.yaml --save runs/checked":
        ("tests/distributed/test_sanity.py", '"find_lr.py"'),
    # faults: the test runs the same program with a smaller model
    "python -m tests.chaos": ("tests/chaos/test_chaos.py", '"-m", "tests.chaos"'),
    "python -m tests.chaos --faults 20 --seed 1 -- ds-pretrain --num_accelerators 2 --config launch/quickstart.yaml "
    "--deepspeed_config ds_configs/zero1_bf16.json --gradient_accumulation_steps 2 --train_steps 60 --save_interval 4 "
    "--keep_checkpoints 3 --async_save --save runs/chaos":
        ("tests/chaos/test_chaos.py", '"-m", "tests.chaos"'),
    # clusters
    "ds-pretrain --num_gpus 8 --config run.yaml": ("tests/cluster/test_ds_pretrain.py", '"--num_gpus"'),
    "ds-pretrain --hostfile HOSTS --config run.yaml": ("tests/cluster/test_multihost_launch.py", '"cluster.sh"'),
    "launch/cluster.sh --hostfile HOSTS -- FLAGS": ("tests/cluster/test_multihost_launch.py", '"cluster.sh"'),
    "python launch/supervise.py --hostfile HOSTS --min_hosts 6 -- ds-pretrain --hostfile HOSTS --config run.yaml":
        ("tests/cluster/test_supervised_hosts.py", '"--min_hosts"'),
    "sbatch -N 4 launch/slurm/pretrain.sbatch run.yaml":
        ("tests/cluster/workers/slurm_cluster.py", '"pretrain.sbatch"'),
    "launch/mpi.sh -np 16 --hostfile HOSTS -- --config run.yaml": ("tests/cluster/test_mpi.py", '"mpi.sh"'),
    "launch/mpi.sh [flags of mpirun] -- [flags of pretrain/train.py]": ("tests/cluster/test_mpi.py", '"mpi.sh"'),
    "kubectl apply -f launch/k8s/indexed-job.yaml": ("tests/cluster/test_k8s.py", '"indexed-job.yaml"'),
    "ds-pretrain --num_accelerators 2 tools/check_cluster.py --save runs/first":
        ("tests/cluster/test_ds_pretrain.py", '"check_cluster.py"'),
    "deepspeed --hostfile HOSTS tools/check_cluster.py --save runs/gpt2":
        ("tests/cluster/test_health.py", '"check_cluster.py"'),
    "srun python tools/check_cluster.py --config run.yaml": ("tests/cluster/test_health.py", '"check_cluster.py"'),
    # other launchers: the tests check the variables of each launcher, and start runs with deepspeed and srun
    "deepspeed pretrain/train.py ...": ("tests/test_quickstart.py", '"deepspeed --num_accelerators 2'),
    "torchrun pretrain/train.py ...": ("tests/distributed/test_world.py", '"torchrun'),
    "mpirun ... python pretrain/train.py ...": ("tests/cluster/workers/mpi.py", "mpirun"),
    "srun python pretrain/train.py ...": ("tests/cluster/test_slurm.py", '"srun --mpi=pmi2"'),
    "python pretrain/train.py ...": ("tests/test_train.py", '"train.py"'),
}

# launch/first_run.md is for 8 GPUs. The tests run its commands with these changes, on two CPU ranks.
SMALLER = {
    "--num_gpus 8": "--num_accelerators 2", "--vocab_size 50257": "--vocab_size 2000", "--train_steps 6000":
    "--train_steps 6", "model: gpt2": "model: gpt2\nmodel_overrides: vocab_size=2000,n_layer=2,n_embd=64,n_head=2",
    "seq_length: 1024": "seq_length: 64", "micro_batch_size: 16": "micro_batch_size: 2", "train_steps: 4800":
    "train_steps: 4", "lr_warmup_steps: 200": "lr_warmup_steps: 1", "eval_interval: 500": "eval_interval: 4",
    "save_interval: 500": "save_interval: 2",
}


def smaller(text: str) -> str:
    """Return a command or the settings of launch/first_run.md for two CPU ranks and a small model."""
    for large, small in SMALLER.items():
        text = re.sub(rf"\b{large}\b" if large[0] != "-" else rf"{large}\b", small, text)
    return text


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, content) of each fenced block."""
    return _FENCE.findall(page.read_text(encoding="utf-8"))


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def block_commands(page: Path) -> list[str]:
    """Return the commands in ```bash blocks, one per line."""
    return [line for language, content in blocks(page) if language == "bash" for line in content.splitlines()]


def inline_commands(page: Path) -> list[str]:
    """Return the commands with arguments in the page's text and tables."""
    return re.findall(rf"`({_PROGRAMS} [^`]*)`", prose(page))


def looks_like_command(line: str) -> bool:
    """Return whether a line of a ```text block is a command rather than output."""
    return re.match(rf"{_PROGRAMS} ", line) is not None and not re.match(r"ds-pretrain( \[flags|: )", line)


def is_checked_by_name(command: str) -> bool:
    """Return whether tests/test_pages.py checks the names of tests or packages in a command.

    tests/run.sh runs these tests.
    """
    return command.startswith(("pytest ", "pip install -c "))


def runnable(page: Path) -> list[str]:
    """Return the commands of a page that tests/test_quickstart.py runs."""
    return [command for command in block_commands(page)
            if command not in COVERED and not is_checked_by_name(command)]
