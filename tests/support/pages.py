"""The documentation pages, their commands, and the reason for each command that test_quickstart.py does not run."""

import re
from pathlib import Path

from tests.support.extensions import entries_of_extensions
from tests.support.launch import ROOT

README = ROOT / "README.md"
# The commands run in this order. A page may use the files that earlier pages created.
PAGES = [README, *(ROOT / name for name in (
    "launch/first_run.md",
    "tools/README.md", "tools/data.md", "tools/data_sources.md", "tools/tokenizers.md",
    "tools/training_data.md", "tools/memory.md",
    "tools/checkpoints.md", "tools/weights.md", "tools/evaluation.md", "tools/gpu.md",
    "tools/dry_gpu/README.md",
    "tools/performance.md", "tools/measurements.md", "tools/metrics.md",
    "ds_configs/README.md", "ds_configs/recipe.md", "ds_configs/long_sequences.md", "ds_configs/pipelines.md",
    "ds_configs/parallelism.md", "ds_configs/claims.md",
    "launch/README.md", "launch/unattended.md", "launch/right_results.md",
    "pretrain/README.md", "pretrain/engine/patches/README.md", "pretrain/extensions/README.md",
    "pretrain/pages/python.md", "pretrain/pages/own_ideas.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("pretrain/extensions/*/*.md"))), "tests/README.md",
    ".github/CONTRIBUTING.md", ".github/SECURITY.md", ".github/CHANGELOG.md"))]

_PROGRAMS = (r"(?:python|deepspeed|ds-pretrain|torchrun|srun|sbatch|mpirun|kubectl|pip|pytest|\w+/[\w/]+\.sh|"
             r"tools/\w+\.py)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

# Reason -> commands that tests/test_quickstart.py does not run, although it runs all others. tests/test_pages.py checks
# the files and flags that they name, and the named tests start the same programs.
NOT_RUN_BECAUSE: dict[str, tuple[str, ...]] = {
    "tests/run.sh runs them around these tests": (
        "tests/run.sh", "tests/run.sh tests/config -k schedule", "launch/setup.sh --dev",
        "launch/setup.sh --offload", "ruff check .", "mypy", "lint-imports"),
    "needs the environment of the dry GPU: tests/dry_gpu starts the same programs": (
        "tools/dry_gpu/dry-gpu --setup", "pytest tests/dry_gpu", "pytest -m slow tests/dry_gpu",
        *(f"pytest -m slow tests/dry_gpu/test_{name}.py" for name in ("runs", "triton_kernels")),
        "DRY_GPU_LINES=runs/lines pytest -m slow tests/dry_gpu", "python tools/dry_gpu/cuda_lines.py runs/lines",
        "DRY_GPU_CACHING=1 DRY_GPU_COUNT=2 tools/dry_gpu/dry-gpu python tools/dry_gpu/memory_table.py --random 40",
        *(f"DRY_GPU_CACHING=1 tools/dry_gpu/dry-gpu python tools/dry_gpu/memory_table.py \"--deepspeed_config {row} "
          "--micro_batch_size 1 --gradient_accumulation_steps 1\"" for row in (
              "zero1_bf16 --model llama3-8b --model_overrides num_hidden_layers=10 --seq_length 2048",
              "zero0_fp32 --model llama3-1b --model_overrides num_hidden_layers=4 --seq_length 4096")),
        "DRY_GPU_COUNT=4 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu",
        "DRY_GPU_CACHING=1 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu -k memory",
        "DRY_GPU_CAPABILITY=90 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu -k grouped",
        "DRY_GPU_COUNT=2 tools/dry_gpu/dry-gpu ds-pretrain --num_gpus 2 --config runs/quickstart/quickstart.yaml "
        "--deepspeed_config zero3_bf16 --gradient_accumulation_steps 2 --train_steps 4 --save runs/dry"),
    "needs the network": (
        "ds-pretrain evaluate runs/quickstart --tasks hellaswag,arc_easy --num_fewshot 5 --limit 200",),
    "takes minutes: tests/test_project.py": (".github/release.sh",),
    "tests/model/test_on_fake_device.py runs it": ("python -m tests.model.on_fake_device",),
    "README.md evaluates and exports another run": (
        "ds-pretrain evaluate runs/run", "ds-pretrain export runs/run --output runs/run-hf"),
    "takes minutes: tests/data/tokenizers/test_measure_encoding.py": (
        "python -m tests.data.tokenizers.measure_encoding tinyshakespeare.txt tutor.ja.utf-8 tutor.ru.utf-8",),
    "needs other versions of Python and torch: tests/test_versions.py": ("tests/versions.sh lowest",),
    "takes a minute: tests/upstream/test_reproducers.py": (
        "python -m tests.upstream.reproduce",),
    "takes minutes on an idle machine: tests/bench/test_bench.py": (
        "python tools/bench.py --preset cpu-small --rounds 2", "python tools/bench.py --what store",
        "python tools/bench.py --what control",
        "python tools/bench.py --preset cpu-shakespeare --precision fp32",
        "python tools/bench.py --what step --preset cpu --write tools/measurements.md",
        "python tools/bench.py --what step --preset cpu-llama-2048 --write tools/measurements.md",
        "python tools/bench.py --what overhead,checkpoint,startup --rounds 3 --write tools/measurements.md"),
    "takes minutes; tests/test_claims.py repeats the other numbers of the page": (
        'run="ds-pretrain --num_accelerators 1 --config runs/quickstart/quickstart.yaml --micro_batch_size 16 '
        "--gradient_accumulation_steps 1 --lr_warmup_steps 1 --eval_interval 0 --eval_steps 1 --save_interval 0 "
        '--log_interval 1"; TIMEFORMAT="%U + %S s"',
        'for i in 1 2; do for r in none blocks "blocks --recompute_every 2" "blocks --recompute_every 3" '
        'attention; do for n in 2 12; do echo "$r, $n steps"; time $run --deepspeed_config zero1_bf16 '
        "--recompute $r --train_steps $n --save $(mktemp -d); done; done; done",
        'for i in 1 2; do for p in zero0_fp32 "zero1_bf16 --plain_operators" zero1_bf16; do for n in 2 7; do '
        'echo "$p, $n steps"; time $run --deepspeed_config $p --train_steps $n --save $(mktemp -d); done; done; '
        "done",
        'for i in 1 2; do for s in 256 1024 4096; do for n in 2 7; do echo "$s tokens, $n steps"; time $run '
        "--deepspeed_config zero1_bf16 --model_overrides "
        "vocab_size=4096,n_embd=256,n_layer=6,n_head=4,n_positions=4096 --seq_length $s --micro_batch_size "
        "$((4096 / s)) --train_steps $n --save $(mktemp -d); done; done; done",
        'for i in 1 2; do for j in zero0_fp32 fused.json unfused.json; do for n in 2 17; do echo "$j, $n steps"; '
        "time $run --deepspeed_config $j --model_overrides vocab_size=4096,n_embd=512,n_layer=8,n_head=8 "
        "--micro_batch_size 1 --seq_length 64 --train_steps $n --save $(mktemp -d); done; done; done",
        'for i in 1 2; do for k in 1 2; do for n in 2 7; do echo "$k ranks, $n steps"; time $run '
        "--num_accelerators $k --deepspeed_config zero1_bf16 --train_steps $n --save $(mktemp -d); done; done; "
        "done",
        "for m in 16 4 1; do $run --deepspeed_config zero0_fp32 --micro_batch_size $m "
        "--gradient_accumulation_steps $((16 / m)) --train_steps 8 --save runs/accumulation-$m; done; $run "
        "--num_accelerators 2 --deepspeed_config zero0_fp32 --micro_batch_size 8 --train_steps 8 --save "
        "runs/accumulation-2-ranks"),
    "needs GPUs": (
        "ds-pretrain --num_gpus 8 --config run.yaml", "python tools/bench.py --preset h200-gpt3-1.3b",
        "python tools/bench.py --preset h200-gpt3-1.3b --what determinism",
        "python tools/bench.py --preset h200-gpt3-1.3b --compile_blocks true",
        "python tools/bench.py --preset h200-llama-1b --compile_blocks true"),
    "needs several hosts: tests/cluster/test_multihost_launch.py and test_mpi.py": (
        "ds-pretrain --hostfile HOSTS --config run.yaml", "launch/cluster.sh --hostfile HOSTS -- --config run.yaml",
        "launch/mpi.sh -np 16 --hostfile HOSTS -- --config run.yaml"),
    "needs SLURM: tests/cluster/test_slurm.py": (
        "sbatch -N 4 launch/slurm/pretrain.sbatch run.yaml",),
    "needs SLURM: tests/cluster/test_slurm_prepare.py": (
        'job=$(sbatch --parsable --array=0-63 runs/prepare.sbatch "text/*.jsonl" --tokenizer data/tokenizer --out '
        "data/corpus)",
        "sbatch --dependency=afterok:$job --kill-on-invalid-dep=yes runs/prepare.sbatch merge data/corpus"),
    "needs Kubernetes: tests/cluster/test_k8s.py": ("kubectl apply -f launch/k8s/indexed-job.yaml",),
}
QUICKSTART = "launch/quickstart.sh"  # run before all pages

# launch/first_run.md is for 16 GPUs. The tests run these commands with the following changes: two CPU ranks, small
# models, few steps.
SMALLER = {
    "--model 1.3B --gpu a100 --nodes 2 --gpus_per_node 8": "--model 1M --gpu cpu --world_size 2 --vocab_size 2000 "
    "--seq_length 64 --steps 4", "--vocab_size 32000": "--vocab_size 2000", "--hostfile hosts": "--num_accelerators 2",
    "check --config run.yaml --world_size 16 --gpu a100": "check --config run.yaml --world_size 2 --device cpu",
}
NOT_RUN_BECAUSE |= entries_of_extensions("page_commands", "NOT_RUN_BECAUSE")
SMALLER |= entries_of_extensions("page_commands", "SMALLER")
NOT_RUN = {command for commands in NOT_RUN_BECAUSE.values() for command in commands}


def smaller(command: str) -> str:
    """Return a command for two CPU ranks and a small model."""
    for large, small in SMALLER.items():
        command = re.sub(rf"{re.escape(large)}\b", small, command)
    return command


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
    return re.match(rf"{_PROGRAMS} ", line) is not None and not re.match(r"ds-pretrain( \w+)? \[|ds-pretrain: ", line)


def is_checked_by_name(command: str) -> bool:
    """Return whether a command runs tests, installs packages or only names a program: tests/test_pages.py checks the
    names.
    """
    return command.startswith(("pytest ", "pip install 'ds-pretrain[")) or command == "python tools/bench.py" or \
        named_subcommand(command) != ""


def named_subcommand(command: str) -> str:
    """Return NAME if the command is `ds-pretrain NAME` or `ds-pretrain NAME COMMAND`; otherwise ""."""
    match = re.fullmatch(r"ds-pretrain (?:([a-z][a-z-]*)(?: [\w-]+)?|--help)", command)
    return "" if match is None else match[1] or "train"


def runnable(page: Path) -> list[str]:
    """Return the commands of a page that tests/test_quickstart.py runs."""
    return [command for command in block_commands(page)
            if command not in NOT_RUN and command != QUICKSTART and not is_checked_by_name(command)]
