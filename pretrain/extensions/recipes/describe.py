"""A page about a recipe: sources, data, runs, expected and measured results, time, memory and commands.

For the full scale on GPUs, also its predicted memory, time and cost, and what this machine lacks to train it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import sha256_of
from pretrain.commands.check import device_of
from pretrain.commands.small_runs import RUN_YAML
from pretrain.commands.small_runs import Run as SmallRun
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_settings
from pretrain.distributed.device import nvidia_smi
from pretrain.errors import ConfigError, counted, format_number
from pretrain.extensions.recipes.recipe import (
    FULL,
    Corpus,
    Dataset,
    Grid,
    OnGpus,
    Recipe,
    Run,
    find_recipe,
    read_dataset,
    read_recipe,
)
from pretrain.extensions.recipes.results import Between
from pretrain.extensions.recipes.tables import sweep_of
from pretrain.memory.compare.compare import predict, tokens_text
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.footprint import DEFAULT_MARGIN, GIB, with_unit
from pretrain.memory.hardware import find_gpu
from pretrain.model.flops import flops_per_token
from pretrain.stored_json import read_object

_TITLES = ("recipe", "parameters", "tokens", "GPUs", "memory of each", "step", "MFU", "days", "GPU-hours",
           "expected loss", "published time")


def plan_of(folder: Path, run: SmallRun, gpu: str | None) -> Plan:
    """Return the plan of a run on its number of GPUs, or of CPU ranks, without data. Raises ConfigError."""
    args = parse_arguments(["--config", str(folder / RUN_YAML), *run.words({})[4:]], from_here=False)
    files: dict[str, Any] = {name: str(folder / value) for name in ("model", "deepspeed_config")
                             if (value := getattr(args, name)) and (folder / value).is_file()}
    return check_settings(replace(args, **files), world_size=run.ranks, device=device_of("cuda" if gpu else "cpu", gpu))


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
    assert row.time is not None
    hours = plan.train_steps * row.time.total_seconds / 3600
    bands = [f"{each.between[0]:g} to {each.between[1]:g}" for each in recipe.expect if isinstance(each, Between)]
    return (tokens_text(plan.model.num_parameters()), tokens_text(plan.length.tokens_after(plan.train_steps)),
            f"{run.ranks} {on_gpus.gpu}",
            row.shortage or f"{row.estimate.device_bytes / GIB:.1f} of "
                            f"{find_gpu(on_gpus.gpu).memory_bytes / GIB:.1f} GiB",
            f"{format_number(row.time.total_seconds)} s", f"{row.time.mfu:.0%}", format_number(hours / 24),
            f"{hours * run.ranks:,.0f}",
            ", ".join(bands) or "-", recipe.time)


def check_machine(name: str, run: SmallRun, plan: Plan, out: Path) -> None:
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


def description(name: str) -> list[str]:
    """Return the lines of a page in Markdown about a recipe. Raises ConfigError."""
    folder = find_recipe(name)
    recipe, corpus = read_recipe(folder)
    sections = {
        "Runs": _runs(folder, recipe),
        "Data": _data(folder, recipe, corpus) if corpus else [],
        "Expected": _expected(recipe),
        "Predicted": _predicted(name, recipe),
        "Measured": _measured(folder),
        "Commands": [f"    ds-pretrain reproduce {name}",
                     *([f"    ds-pretrain reproduce {name} --scale small"] if corpus else [])],
    }
    lines = [f"# {recipe.title}", "", f"Published in {recipe.source}. Time: {recipe.time}."]
    for title, content in sections.items():
        if content := list(content):
            lines += ["", f"## {title}", "", *content]
    return lines


def _runs(folder: Path, recipe: Recipe) -> Iterator[str]:
    """Yield a line for each different model of the full scale, with its runs and sweeps."""
    names: dict[str, list[str]] = {}
    for each in recipe.runs:
        for run in each.runs() if isinstance(each, Grid) else [each]:
            of_model = names.setdefault(_model_text(folder, recipe, run), [])
            if isinstance(each, Grid):
                of_model.append(sweep_of(run.name))
            elif run.name not in of_model:
                of_model.append(run.name)
    for text, of_model in names.items():
        counts = Counter(of_model)
        yield f"- {', '.join(f'{name} ({number} runs)' if number > 1 else name for name, number in counts.items())}: " \
              f"{text}"


def _model_text(folder: Path, recipe: Recipe, run: Run) -> str:
    gpu = recipe.on_gpus.gpu if recipe.on_gpus else None
    plan = plan_of(folder, run, gpu)
    ranks = f"{run.ranks} {gpu}" if gpu else counted(run.ranks, "rank")
    memory = "" if gpu else f", predicted memory {with_unit(estimate_memory(plan.model, plan.layout).needed_bytes)}"
    return f"{plan.model.architecture}, {plan.model.parameters_text()}, " \
           f"{flops_per_token(plan.model, plan.args.seq_length):.3g} FLOPs a token, " \
           f"{tokens_text(plan.length.tokens_after(plan.train_steps))} tokens, {ranks}{memory}"


def _data(folder: Path, recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    if recipe.on_gpus:
        dataset = read_dataset(folder, recipe.on_gpus)
        yield f"{dataset.source}{f'; {dataset.size}' if dataset.size else ''}. Prepared by these commands:"
        yield ""
        yield from (f"    {command}" for command in dataset.prepare)
        yield from ([""] if dataset.sha256 else [])
        yield from (f"SHA-256 of {file}: {value}" for file, value in dataset.sha256.items())
        yield from ("", "Of the small scale:", "")
    yield f"{corpus.url}, SHA-256 {corpus.sha256}. Prepared by these commands:"
    yield ""
    for file, (begin, end) in corpus.parts.items():
        yield f"    # {file}: from {begin:.0%} to {end:.0%} of the text"
    yield from (f"    ds-pretrain {command}" for command in corpus.prepare)


def _expected(recipe: Recipe) -> Iterator[str]:
    """Yield what is expected of a full scale that was not run here; of others the receipt has it."""
    if recipe.on_gpus is None:
        return
    yield from (f"- {each.run}: validation loss {each.band_text()}" for each in recipe.expect
                if isinstance(each, Between))
    if not recipe.expect:
        yield "No loss is published to compare with."


def _predicted(name: str, recipe: Recipe) -> list[str]:
    return prediction_table([name]) if recipe.on_gpus else []


def _measured(folder: Path) -> Iterator[str]:
    """Yield the content of the receipt, if there is one. Raises ConfigError."""
    path = folder / "receipt.json"
    if not path.exists():
        return
    try:
        receipt = read_object(path)
        seconds = [run["seconds_of_steps"] for run in receipt["runs"].values()]
        versions = ", ".join(f"{name} {version}" for name, version in receipt["versions"].items())
        yield f"{receipt['scale'].capitalize()} scale, {receipt['date']}, {receipt['machine']}: " \
              + (f"{counted(len(seconds), 'run')}, {sum(seconds):.0f} s of steps together. " if seconds else "") \
              + f"Python {receipt['python']}, {versions}."
        yield ""
        yield from (f"- {'ok' if result['met'] else 'NOT MET'}: {result['text']}" for result in receipt["results"])
        yield from (f"- SHA-256 of {file}: {value}" for file, value in receipt["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), problem=f"it is no receipt of a recipe ({type(error).__name__}: {error})",
                          remedy="remove it, or train the recipe and copy the new one here") from None
