"""A page about a recipe: sources, data, runs, expected and measured results, time, memory and commands."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pretrain.errors import ConfigError, counted, tokens_text
from pretrain.extensions.recipes.curves import sweep_of
from pretrain.extensions.recipes.on_gpus import plan_of, prediction_table
from pretrain.extensions.recipes.recipe import Corpus, Grid, Recipe, Run, find_recipe, read_dataset, read_recipe
from pretrain.extensions.recipes.verdict import Between
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.footprint import with_unit
from pretrain.model.flops import flops_per_token
from pretrain.stored_json import read_object


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
