"""The results of a sweep: a table, what lies at the edge of the space, JSON, and plots."""

import math
from pathlib import Path
from typing import Any

from pretrain.cli import say
from pretrain.extensions.sweep.sweep_file import Dimension, SweepFile

_EDGE = 0.05  # fraction of a range that counts as its edge
_SHOWN = 10  # runs of the table


def results(sweep: SweepFile, study: Any) -> dict[str, Any]:
    """Return the runs, the best first, as JSON values."""
    runs = [{"run": str(sweep.folder / trial.user_attrs.get("folder", "")), "state": trial.state.name.lower(),
             "loss": trial.value if trial.state.name == "COMPLETE" else None, "evaluations": len(
                 trial.intermediate_values), "flags": dict(trial.params)}
            for trial in study.trials if not trial.user_attrs.get("again")]
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
    import warnings

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
