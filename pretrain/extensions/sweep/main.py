"""Search settings by many runs: the subcommand, and the results of a sweep as a table, JSON and plots.

    ds-pretrain sweep SWEEP
"""

import json
import math
import warnings
from pathlib import Path
from typing import Any

from pretrain.cli import Parser, path_text, say
from pretrain.errors import CRASHED, INTERRUPTED, ConfigError
from pretrain.extensions.sweep.study import STORAGE, Sweep, check_sweep, name_of, newest_trials, open_study
from pretrain.extensions.sweep.sweep_file import Dimension, SweepFile, read_sweep

_EDGE = 0.05  # fraction of a range that counts as its edge
_SHOWN = 10  # runs of the table


def main() -> int:
    """Run the sweep. Returns 1 if no run has a result; raises ConfigError."""
    parser = Parser(description="Search the settings with the lowest validation loss, by many runs. The command can be "
                                "given again: it continues.")
    parser.add_argument("file", type=path_text, metavar="SWEEP.yaml", help="the space, and the runs: see the page "
                        "pretrain/extensions/sweep/README.md")
    parser.add_argument("--results", action="store_true", help="start no run: print the results so far")
    parser.add_argument("--json", action="store_true", help="print the results as a JSON object")
    args = parser.parse_args()
    sweep = read_sweep(args.file)
    if args.results and not (sweep.folder / STORAGE).is_file():
        raise ConfigError(f"{args.file}: folder", problem=f"{sweep.folder} has no runs of a sweep yet",
                          remedy="start it without --results")
    if not args.results:
        check_sweep(sweep)
    study = open_study(sweep)
    if not args.results:
        try:
            Sweep(sweep, study).run()
        except KeyboardInterrupt:
            say(f"interrupted; the runs have saved, and `ds-pretrain sweep {args.file}` continues them")
            return INTERRUPTED
    found = results(sweep, study)
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print_results(found)
        for path in write_plots(study, sweep.folder):
            print(path)
    return 0 if found["best"] is not None else CRASHED


def results(sweep: SweepFile, study: Any) -> dict[str, Any]:
    """Return the runs, the best first, as JSON values."""
    runs = [{"run": str(sweep.folder / name_of(trial)), "state": trial.state.name.lower(),
             "loss": trial.value if trial.state.name == "COMPLETE" else None, "evaluations": len(
                 trial.intermediate_values), "flags": dict(trial.params)}
            for trial in newest_trials(study)]
    runs.sort(key=lambda run: (math.inf if run["loss"] is None else run["loss"], run["run"]))
    best = runs[0] if runs and runs[0]["loss"] is not None else None
    return {"metric": sweep.metric, "best": best, "edges": edges(sweep.space, best["flags"]) if best else [],
            "runs": runs}


def edges(space: tuple[Dimension, ...], best: dict[str, Any]) -> list[str]:
    """Return a line for each flag whose best value lies at the edge of its range."""
    lines = []
    for each in space:
        value = best.get(each.flag)
        if each.choices or value is None:
            continue
        low, high, at = (math.log(number) if each.log else number for number in (each.low, each.high, value))
        place = (at - low) / (high - low)
        if not _EDGE < place < 1 - _EDGE:
            side, limit = ("lower", "low") if place <= _EDGE else ("upper", "high")
            lines.append(f"{each.flag}: the best value, {value:.4g}, lies at the {side} edge of {each.low:g} to "
                         f"{each.high:g}: extend {limit}")
    return lines


def print_results(found: dict[str, Any]) -> None:
    """Print the best runs, the number of the others, and the edges."""
    runs = found["runs"]
    for run in runs[:_SHOWN]:
        loss = f"{run['loss']:.4f}" if run["loss"] is not None else run["state"]
        print(f"{loss:<9} {run['run']}  " + ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in run["flags"].items()))
    states = [run["state"] for run in runs]
    print(f"{states.count('complete')} complete, {states.count('pruned')} ended early, {states.count('fail')} failed")
    for line in found["edges"]:
        print(line)


def write_plots(study: Any, folder: Path) -> list[Path]:
    """Write parallel coordinates, slices and the importance of the flags as PNG; what has too few runs is left out."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from optuna import importance, visualization
    except ImportError:
        say("note: no plots without the package matplotlib; run `pip install 'ds-pretrain[sweep]'`")
        return []
    if sum(trial.state.name == "COMPLETE" for trial in study.trials) < 2:
        return []
    plots = visualization.matplotlib
    makers = {"parallel_coordinates": plots.plot_parallel_coordinate, "slices": plots.plot_slice,
              "importance": lambda study: plots.plot_param_importances(
                  study, evaluator=importance.PedAnovaImportanceEvaluator())}
    written = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in makers.items():
            try:
                make(study)
            except (ValueError, RuntimeError):  # too few runs, or runs with equal losses
                continue
            path = folder / f"{name}.png"
            pyplot.gcf().savefig(path, bbox_inches="tight")
            pyplot.close("all")
            written.append(path)
    return written
