"""Train a recipe and compare its result with the published one.

    ds-pretrain reproduce                                # list the recipes
    ds-pretrain reproduce shakespeare-char --scale small

Everything is in the folder --out: the recipe's files, data, runs, verdict.svg and receipt.json. The command can be
given again: it skips finished parts, and runs resume. Exit codes: 0 all expectations are met; 1 not; 2 bad input.
"""

import hashlib
import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pretrain import __version__
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import Parser, path, path_text, say, text, whole_number
from pretrain.commands.small_runs import Curve, last_step, read_curve, run_subcommand, train_runs
from pretrain.distributed.device import cpu_name, nvidia_smi
from pretrain.errors import ConfigError
from pretrain.extensions.recipes.describe import (
    check_data,
    check_hashes,
    check_machine,
    description,
    plan_of,
    prediction_table,
)
from pretrain.extensions.recipes.recipe import (
    FULL,
    SMALL,
    Corpus,
    OnGpus,
    Recipe,
    Scale,
    find_recipe,
    read_dataset,
    read_recipe,
    recipe_names,
)
from pretrain.extensions.recipes.results import save_plot
from pretrain.extensions.recipes.tables import Activations, Result, Table
from pretrain.stored_json import read_object

_VERSIONS = ("torch", "deepspeed", "transformers", "numpy")
_RECEIPT = "receipt.json"
_ROWS_OF_RECEIPT = 10
_TIMEOUT_S = 60


def main() -> int:
    """Run the program and return its exit code. Raises ConfigError."""
    parser = Parser(description="Train a recipe of this package and compare its result with the published one.",
                    epilog="The command can be given again: it skips finished parts, and the runs resume. Exit code 0: "
                           "the results are as expected; 1: they are not; 2: bad input.")
    parser.add_argument("recipe", metavar="NAME", nargs="?", type=path_text,
                        help=f"{', '.join(recipe_names())}, or a folder; without a name: print a list")
    parser.add_argument("--scale", choices=(FULL, SMALL), default=FULL,
                        help="small: a minute of training with the same files, and its own expected loss "
                             "(default: %(default)s)")
    parser.add_argument("--out", type=path, help="folder for all files (default: runs/NAME, or runs/NAME-small)")
    parser.add_argument("--corpus", type=text, metavar="FILE", help="the corpus, instead of a download")
    parser.add_argument("--ranks", type=whole_number(1, 10**6), metavar="N",
                        help="GPUs of the full scale of a recipe for GPUs (default: as in its recipe.yaml)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--describe", action="store_true",
                       help="print sources, data, runs, expected and measured results of the recipe, and train nothing")
    shown.add_argument("--predict", action="store_true",
                       help="print the predicted memory, time and cost of a recipe for GPUs, or without a name of all "
                            "of them, and train nothing")
    args = parser.parse_args()
    if args.describe:
        if args.recipe is None:
            raise ConfigError("--describe", problem="it needs the NAME of a recipe",
                              remedy=f"the recipes are {', '.join(recipe_names())}")
        print("\n".join(description(args.recipe)))
        return 0
    if args.predict:
        print("\n".join(prediction_table([args.recipe] if args.recipe else recipe_names())))
        return 0
    if args.recipe is None:
        for name in recipe_names():
            recipe, _ = read_recipe(find_recipe(name))
            print(f"{name:<20}{recipe.title} ({recipe.time}{'; not run here' if recipe.on_gpus else ''})")
        return 0
    folder = find_recipe(args.recipe)
    recipe, corpus = read_recipe(folder)
    on_gpus = recipe.on_gpus if args.scale == FULL else None
    if args.ranks is not None and on_gpus is None:
        raise ConfigError("--ranks", problem="it has no effect here",
                          remedy="it is for the full scale of recipes for GPUs")
    if corpus is None and (args.corpus is not None or args.scale == SMALL):
        raise ConfigError("--scale small" if args.scale == SMALL else "--corpus", problem="it has no effect here",
                          remedy="the recipe computes published tables, and trains nothing")
    if args.corpus is not None and on_gpus is not None:
        raise ConfigError("--corpus", problem="it is for --scale small here",
                          remedy="prepare the data with the commands that are printed without this flag")
    scale = recipe.scales[args.scale]
    out = args.out or Path("runs") / (folder.resolve().name + ("-small" if args.scale == SMALL else ""))
    content = None
    if corpus is not None and on_gpus is None and (args.corpus is not None or not (out / corpus.file).exists()):
        content = _read_corpus(corpus, args.corpus)
    _copy(folder, out)
    try:
        if on_gpus is not None:
            scale, hashes = _prepare_on_gpus(folder, on_gpus, scale, out, args.ranks)
        else:
            hashes = _prepare(corpus, out, content) if corpus is not None else {}
        seconds = train_runs(scale.starts(), out, scale.flags) if scale.runs else {}
    except subprocess.CalledProcessError as error:
        say(f"stopped: {shlex.join(['ds-pretrain', *error.cmd[2:]])} ended with exit code {error.returncode}")
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return _conclude(recipe, folder, out, args.scale, hashes=hashes, seconds=seconds)


def _copy(folder: Path, out: Path) -> None:
    """Copy the recipe into the folder of its runs, without the receipt of another machine. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if out.samefile(folder):
            raise ConfigError(f"--out {out}", problem="it is the folder of the recipe", remedy="name another folder")
        for file in (each for each in sorted(folder.iterdir()) if each.suffix in (".yaml", ".json")):
            if file.name != _RECEIPT:
                shutil.copyfile(file, out / file.name)
    except OSError as error:
        raise ConfigError(f"--out {out}", problem=f"it cannot be written ({error.strerror})") from None


def _prepare_on_gpus(folder: Path, on_gpus: OnGpus, scale: Scale, out: Path,
                     ranks: int | None) -> tuple[Scale, dict[str, str]]:
    """Check this machine, then the data that the user has prepared. Returns the runs on these ranks, and hashes.

    Raises ConfigError if GPUs or data are missing.
    """
    runs = [replace(run, ranks=ranks or run.ranks) for run in scale.starts()]
    scale = replace(scale, runs=list(runs))
    dataset, last = read_dataset(folder, on_gpus), _last_steps(scale, out)
    hashes: dict[str, str] = {}
    for run in runs:
        plan = plan_of(folder, run, on_gpus.gpu)
        if last[run.name] < plan.train_steps:  # it may have been trained on several hosts
            check_machine(folder.resolve().name, run, plan, out)
            check_data(plan, dataset, out)
            hashes |= check_hashes(dataset.sha256, out)
    return scale, hashes


def _prepare(corpus: Corpus, out: Path, content: bytes | None) -> dict[str, str]:
    """Cut the corpus, unless it is there (None), and prepare the token files. Returns file -> SHA-256."""
    if content is not None:
        for name, (begin, end) in corpus.parts.items():
            (out / name).write_bytes(content[int(len(content) * begin):int(len(content) * end)])
        write_atomically(out / corpus.file, content.decode())  # last: if it exists, the parts do
    for line in corpus.prepare:
        words = shlex.split(line)
        result = words[words.index("--out") + 1]
        if not any((out / f"{result}{suffix}").exists() for suffix in ("", ".idx")):
            run_subcommand(out, *words)
    files = [*corpus.parts, *(str(each.relative_to(out)) for each in sorted(out.glob("data/*.bin")))]
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in files}


def _read_corpus(corpus: Corpus, given: str | None) -> bytes:
    """Return the corpus, whose hash must be the recipe's. Raises ConfigError."""
    where = f"--corpus {given}" if given is not None else corpus.url
    try:
        if given is not None:
            content = Path(given).read_bytes()
        else:
            say(f"downloading {corpus.url}")
            with urllib.request.urlopen(corpus.url, timeout=_TIMEOUT_S) as answer:
                content = answer.read()
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last one: a download that ends early
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(where, problem=f"it cannot be read ({reason})",
                          remedy=f"give --corpus FILE, a copy of {corpus.url}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != corpus.sha256:
        raise ConfigError(where, problem=f"its SHA-256 is {found}; the recipe's corpus has {corpus.sha256}",
                          remedy=f"give --corpus FILE, a copy of {corpus.url}")
    return content


def _last_steps(scale: Scale, out: Path) -> dict[str, int]:
    return {name: last_step(out, name) for name in scale.names()}


def _conclude(recipe: Recipe, folder: Path, out: Path, scale: str, *, hashes: dict[str, str],
              seconds: dict[str, float]) -> int:
    """Print the result, write receipt.json and verdict.svg, and return the exit code."""
    expect, names = recipe.scales[scale].expect, recipe.scales[scale].names()
    curves = {name: read_curve(out / "runs" / name) for name in names}
    results = [each.result(curves) for each in expect]
    receipt = _receipt(curves, results, scale=scale, hashes=hashes, seconds=seconds)
    write_atomically(out / _RECEIPT, json.dumps(receipt, indent=1) + "\n")
    print(f"\n{recipe.title} ({scale} scale)")
    for result in results:
        print(f"{'ok' if result.is_met else 'NOT MET':<9}{result.text}")
    if (folder / _RECEIPT).exists():
        try:
            _print_comparison(read_object(folder / _RECEIPT), receipt)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # the results are known, and remain valid
            print(f"{folder / _RECEIPT} is no receipt of a recipe ({type(error).__name__}: {error})")
    print(f"published in: {recipe.source}")
    written = [out / _RECEIPT]
    if save_plot(out / "verdict.svg", recipe.title, curves, expect):
        written.append(out / "verdict.svg")
    if tables := [line for each in expect if isinstance(each, Table | Activations) for line in _section(each)]:
        write_atomically(out / "tables.md", "\n".join(tables))
        written.append(out / "tables.md")
    print(f"written: {', '.join(map(str, written))}"
          + ("; no plot: pip install 'ds-pretrain[plot]'" if len(written) == 1 else ""))
    missed = sum(not result.is_met for result in results)
    met = "reproduced" if scale == FULL else "as expected at the small scale, which does not show the published result"
    if not results:
        met = "trained; no loss is published to compare with"
    print(f"verdict: {f'{missed} of {len(results)} expectations NOT met' if missed else met}")
    return int(missed > 0)


def _section(table: Table | Activations) -> list[str]:
    return ["", f"**{table.title}**", "", *table.lines(), ""]


def _receipt(curves: Mapping[str, Curve], results: list[Result], *, scale: str, hashes: dict[str, str],
             seconds: dict[str, float]) -> dict[str, Any]:
    """Return what was measured: machine, versions, data, and losses of each run at fixed steps."""
    runs = {}
    for name, curve in curves.items():
        steps = sorted(curve.training)
        shown = steps[:: max(1, len(steps) // _ROWS_OF_RECEIPT)]
        runs[name] = {"seconds_of_steps": round(seconds[name], 1),
                      "loss": {str(step): round(curve.training[step], 6) for step in shown},
                      "validation_loss": {str(step): round(loss, 6) for step, loss in curve.validation.items()}}
    gpus = nvidia_smi("name")
    return {"scale": scale, "date": time.strftime("%Y-%m-%d"),
            "machine": f"{len(gpus)} x {gpus[0]}" if gpus else f"{len(os.sched_getaffinity(0))} cores, {cpu_name()}",
            "python": sys.version.split()[0],
            "versions": {"ds-pretrain": __version__, **{name: version(name) for name in _VERSIONS}},
            "sha256": hashes, "runs": runs,
            "results": [{"met": result.is_met, "text": result.text} for result in results]}


def _print_comparison(recorded: dict[str, Any], receipt: dict[str, Any]) -> None:
    """Print the last validation losses next to those of the recipe's receipt, if it is of the same scale."""
    if recorded.get("scale") != receipt["scale"]:
        return
    print(f"the receipt of the recipe: {recorded.get('machine')}, {recorded.get('date')}")
    for name, run in receipt["runs"].items():
        before = list((recorded.get("runs", {}).get(name) or {}).get("validation_loss", {}).values())
        here = list(run["validation_loss"].values())
        if before and here:
            print(f"  {name}: validation loss {before[-1]:.4f}, here {here[-1]:.4f}")
