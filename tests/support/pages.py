"""The documentation pages, their commands, and the reason for each command that test_quickstart.py does not run."""

import re
from pathlib import Path

from tests.support.extensions import entries_of_extensions
from tests.support.launch import ROOT

README = ROOT / "README.md"
GUIDE = ROOT / "pretrain/pages/concepts.md"  # its commands train the run that other pages resume, verify and export


def _found(pattern: str) -> list[str]:
    return sorted(str(page.relative_to(ROOT)) for page in ROOT.glob(pattern))


_CORE = [f"pretrain/pages/{name}.md" for name in (
    "concepts", "first_run", "data", "training_data", "memory", "checkpoints", "weights", "evaluation", "gpu",
    "measurements", "metrics", "layouts", "deepspeed_json", "models", "experts", "recipe", "launch",
    "unattended", "right_results")]
# The commands run in this order. A page may use the files that earlier pages created.
PAGES = [README, *(ROOT / name for name in (
    *_CORE, *(name for name in _found("pretrain/pages/*.md") if name not in _CORE),
    "tools/README.md", "tools/dry_gpu/README.md", "pretrain/README.md", "pretrain/engine/patches/README.md",
    "pretrain/extensions/README.md", *_found("pretrain/extensions/*/*.md"), "tests/README.md",
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
        "pytest -m slow tests/dry_gpu/test_triton_kernels.py",
        "DRY_GPU_LINES=runs/lines pytest -m slow tests/dry_gpu", "python tools/dry_gpu/cuda_lines.py runs/lines",
        "DRY_GPU_CACHING=1 DRY_GPU_COUNT=2 tools/dry_gpu/dry-gpu python tools/dry_gpu/memory_table.py --random 40",
        "DRY_GPU_COUNT=4 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu",
        "DRY_GPU_CACHING=1 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu -k memory",
        "DRY_GPU_CAPABILITY=90 tools/dry_gpu/dry-gpu pytest tests/gpu -m gpu -k grouped",
        "DRY_GPU_COUNT=2 tools/dry_gpu/dry-gpu ds-pretrain --num_gpus 2 --config runs/quickstart/quickstart.yaml "
        "--deepspeed_config zero3_bf16 --gradient_accumulation_steps 2 --train_steps 4 --save runs/dry"),
    "needs the network": (
        "ds-pretrain evaluate runs/quickstart --tasks hellaswag,arc_easy --num_fewshot 5 --limit 200",),
    "takes minutes: tests/test_project.py": (".github/release.sh",),
    "tests/model/test_on_fake_device.py runs it": ("python -m tests.model.on_fake_device",),
    "the page of concepts evaluates and exports another run": (
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
        "python tools/bench.py --what step --preset cpu --write pretrain/pages/measurements",
        "python tools/bench.py --what step --preset cpu-llama-2048 --write pretrain/pages/measurements",
        "python tools/bench.py --what overhead,checkpoint,startup --rounds 3 --write pretrain/pages/measurements"),
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

# The README and first_run.md are for 16 GPUs. The tests run these commands with the following changes: two CPU ranks,
# small models, few steps.
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
