"""The full scale of a recipe for GPUs: its predicted memory, time and cost, and what this machine lacks to train it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import sha256_of
from pretrain.commands.check import device_of
from pretrain.commands.small_runs import RUN_YAML, Run
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_settings
from pretrain.distributed.device import nvidia_smi
from pretrain.errors import ConfigError, counted, format_number, tokens_text
from pretrain.extensions.recipes.recipe import FULL, Dataset, OnGpus, Recipe, find_recipe, read_recipe
from pretrain.extensions.recipes.verdict import Between
from pretrain.memory.compare.candidates import Candidate
from pretrain.memory.compare.compare import ComparisonRow, Workload, estimate_candidate
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.footprint import DEFAULT_MARGIN, GIB, with_unit
from pretrain.memory.hardware import find_gpu, make_cluster

_TITLES = ("recipe", "parameters", "tokens", "GPUs", "memory of each", "step", "MFU", "days", "GPU-hours",
           "expected loss", "published time")


def plan_of(folder: Path, run: Run, gpu: str | None) -> Plan:
    """Return the plan of a run on its number of GPUs, or of CPU ranks, without data. Raises ConfigError."""
    args = parse_arguments(["--config", str(folder / RUN_YAML), *run.words({})[4:]], from_here=False)
    files: dict[str, Any] = {name: str(folder / value) for name in ("model", "deepspeed_config")
                             if (value := getattr(args, name)) and (folder / value).is_file()}
    return check_settings(replace(args, **files), world_size=run.ranks, device=device_of("cuda" if gpu else "cpu", gpu))


def predict(plan: Plan, gpu: str) -> ComparisonRow:
    """Estimate a plan on GPUs of a kind. Raises ConfigError."""
    cluster = make_cluster(gpu=gpu, world_size=plan.layout.world_size, nodes=None, gpus_per_node=None)
    return estimate_candidate(Candidate(plan.ds_config, plan.layout), Workload.of(plan.model, cluster))


def prediction_table(names: Sequence[str]) -> list[str]:
    """Return a Markdown table with a row for each recipe for GPUs among the named ones. Raises ConfigError."""
    recipes = [(name, find_recipe(name)) for name in names]
    rows = [(name, *_cells(folder, recipe, recipe.on_gpus)) for name, folder in recipes
            if (recipe := read_recipe(folder)[0]).on_gpus is not None]
    if not rows:
        raise ConfigError("--predict", problem=f"{', '.join(names)} is no recipe for GPUs", remedy="leave the name out")
    return [f"| {' | '.join(row)} |" for row in (_TITLES, ("---",) * len(_TITLES), *rows)]


def _cells(folder: Path, recipe: Recipe, on_gpus: OnGpus) -> tuple[str, ...]:
    run = recipe.scales[FULL].starts()[0]
    plan = plan_of(folder, run, on_gpus.gpu)
    row = predict(plan, on_gpus.gpu)
    hours = plan.train_steps * row.step_seconds / 3600
    times = (f"{format_number(row.step_seconds)} s", f"{row.step['mfu']:.0%}", format_number(hours / 24),
             f"{hours * run.ranks:,.0f}") if row.step else ("-",) * 4  # no extension predicts them
    bands = [f"{each.between[0]:g} to {each.between[1]:g}" for each in recipe.expect if isinstance(each, Between)]
    return (tokens_text(plan.model.num_parameters()), tokens_text(plan.length.tokens_after(plan.train_steps)),
            f"{run.ranks} {on_gpus.gpu}",
            row.shortage or f"{row.estimate.device_bytes / GIB:.1f} of "
                            f"{find_gpu(on_gpus.gpu).memory_bytes / GIB:.1f} GiB",
            *times, ", ".join(bands) or "-", recipe.time)


def check_machine(name: str, run: Run, plan: Plan, out: Path) -> None:
    """Raise ConfigError if this machine has too few GPUs for a run, or too small ones."""
    mebibytes = [int(line) if line.isdigit() else 0 for line in nvidia_smi("memory.total")]
    needed = estimate_memory(plan.model, plan.layout).needed_bytes
    if len(mebibytes) < run.ranks:
        raise ConfigError(
            f"reproduce {name}", problem=f"it needs {counted(run.ranks, 'GPU')} with {with_unit(needed)} each, and "
            f"this machine has {counted(len(mebibytes), 'GPU')}",
            remedy=f"give --scale small, or --ranks N for fewer GPUs; on several hosts, train in {out} with "
                   f"`ds-pretrain --hostfile HOSTS --config {RUN_YAML} --save runs/{run.name}`, and give this command "
                   "again")
    smallest = min(mebibytes) * 2**20
    if 0 < smallest * (1 - DEFAULT_MARGIN) < needed:
        raise ConfigError(f"reproduce {name}", problem=f"a GPU needs {with_unit(needed)} with {run.ranks} GPUs, and "
                          f"those of this machine have {with_unit(smallest)}",
                          remedy="give more --ranks, or a smaller micro_batch_size in a copy of the recipe")


def check_data(plan: Plan, dataset: Dataset, out: Path) -> None:
    """Raise ConfigError with the commands that prepare the data, unless the files exist."""
    for prefix in plan.data.prefixes:
        if not (out / f"{prefix}.idx").exists():
            raise ConfigError(f"{out / prefix}.idx", problem=f"the data is not prepared: {dataset.source}"
                              + (f", {dataset.size}" if dataset.size else ""),
                              remedy=f"in {out}: {' && '.join(dataset.prepare)}")


def check_hashes(hashes: Mapping[str, str], out: Path) -> dict[str, str]:
    """Return the hashes of the files whose SHA-256 is published. Raises ConfigError if one differs."""
    for name, expected in hashes.items():
        if (found := sha256_of(out / name)) != expected:
            raise ConfigError(str(out / name), problem=f"its SHA-256 is {found}; the published data has {expected}",
                              remedy="download it again")
    return dict(hashes)
