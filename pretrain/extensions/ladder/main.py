"""Predict the loss of a run before its launch, from smaller models that are trained on the same data.

    ds-pretrain ladder --target run.yaml --budget 2h

Everything is in the folder --out: plan.json, the smaller runs, ladder.json and ladder.html. The command can be given
again: finished runs are skipped, others resume. Exit codes: 0 the prediction is written; 2 bad input.

    ds-pretrain ladder --points losses.csv               # backtest: predict the largest model of a table
    ds-pretrain ladder --target small.yaml --mixtures 5  # predict the losses of other weights of the blend
"""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import Parser, number, path, path_text, say, text, whole_number
from pretrain.commands.check import device_of
from pretrain.config.flags.arguments import DEFAULTS
from pretrain.data.data_spec import names_of_split
from pretrain.data.token_schedules import parse_token_count
from pretrain.distributed.device import nvidia_smi, wants_cpu
from pretrain.errors import ConfigError, reason_of, shorten
from pretrain.extensions.ladder.expected_curve import CurvePoint, Target, corpus_of
from pretrain.extensions.ladder.fit import fit_law, fit_stable_law
from pretrain.extensions.ladder.ladder_file import (
    DECAYED,
    LARGEST_FACTOR,
    STABLE,
    Ladder,
    Law,
    Point,
    Range,
    write_ladder,
)
from pretrain.extensions.ladder.mixture_runs import mixtures_main
from pretrain.extensions.ladder.page import page
from pretrain.extensions.ladder.plan import Plan, Wish, batch_of, check_reach, make_plan, plan_lines
from pretrain.extensions.ladder.points import backtest_of
from pretrain.extensions.ladder.target import (
    TargetRun,
    family_sizes,
    nearest_sizes,
    read_target,
    say_left_out,
    write_settings,
)
from pretrain.extensions.ladder.train import measure_times, read_points, train_ladder
from pretrain.monitor.curve import Expected
from pretrain.paths import check_folder
from pretrain.stored_json import build, read_object

_CURVE_POINTS = 48  # at equal factors, and as many at equal distances
# flags of the target that do not change the smaller runs, as those of extensions do not; its length changes the
# prediction only
_WITHOUT_EFFECT = ("save", "note", "trackio", "resume", "log_interval", "save_interval",
                   "keep_checkpoints", "exit_step", "exit_after_minutes", "eval_interval", "train_steps",
                   "train_tokens", "lr_warmup_steps", "lr_warmup_tokens")
PLAN_FILE, LADDER_FILE, PAGE_FILE = "plan.json", "ladder.json", "ladder.html"
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def make_ladder(target: TargetRun, points: Sequence[Point]) -> Ladder:
    """Fit the laws and predict the target. Raises ConfigError if the points do not determine the laws."""
    try:
        decayed = fit_law([point for point in points if point.decayed])
        laws = {DECAYED: decayed, STABLE: fit_stable_law(decayed, [point for point in points if not point.decayed])}
    except ValueError as error:
        raise ConfigError("ladder", problem=f"the law cannot be fitted: {error}",
                          remedy="give a larger --budget, or more --parameters") from None
    plan = target.plan
    sources = [source for name in ("train", *names_of_split(plan.datasets, "valid"))
               for source in plan.datasets[name].sources]
    fitted = Range.of(points)
    return Ladder(corpus_of(sources), plan.model.vocab_size, plan.model.architecture, target.scaling, list(points),
                  laws, fitted, predict_target(target, laws, fitted))


def predict_target(target: TargetRun, laws: Mapping[str, Law], fitted: Range) -> Target:
    """Return the expected losses of the target's run, under its own schedule."""
    length, last = target.plan.length, target.plan.train_steps
    first = max(target.schedule.warmup_steps, length.steps_of(int(fitted.tokens[0])), 1)
    first = min(first, max(1, last // 2))  # a curve has two points at least
    curve = []
    for step in _steps(first, last):
        tokens = float(length.tokens_after(step))
        expected = expected_loss(target, laws, step)
        curve.append(CurvePoint(tokens, expected.loss, expected.low, expected.high))
    end = curve[-1]
    return Target(float(target.parameters), end.tokens, float(target.plan.layout.tokens_per_step), end.loss, end.low,
                  end.high, curve, target.peak_rate)


def expected_loss(target: TargetRun, laws: Mapping[str, Law], step: int) -> Expected:
    """Return the expected validation loss after a step.

    While the learning rate is at its peak, it is that of the law of the stable phase. It approaches the law of the
    decayed runs in proportion to the fall of the rate.
    """
    tokens = float(target.plan.length.tokens_after(step))
    stable, decayed = (laws[name].predict(target.parameters, tokens) for name in (STABLE, DECAYED))
    part = decayed_part(target, step)
    mixed = [(1 - part) * getattr(stable, name) + part * getattr(decayed, name) for name in ("loss", "low", "high")]
    return Expected(*mixed)


def decayed_part(target: TargetRun, step: int) -> float:
    """Return how far the rate has fallen: 0 at its peak, 1 at the lowest rate of the smaller runs' decays."""
    schedule, lowest = target.schedule, target.decay[1]
    fallen = (1 - schedule(max(0, step - 1)) / schedule.peak) / (1 - lowest) if lowest < 1 else 0.0
    return min(max(fallen, 0.0), 1.0)


def _steps(first: int, last: int) -> list[int]:
    """Return steps from the first to the last: the curve is steep at its begin, and in the decay at its end."""
    parts = [index / _CURVE_POINTS for index in range(_CURVE_POINTS + 1)]
    return sorted({*(round(first * (last / first) ** part) for part in parts),
                   *(round(first + (last - first) * part) for part in parts)})


def duration(word: str) -> float:
    """Argparse type: a time such as 2h, 90m or 1.5d, in seconds."""
    found = _DURATION.fullmatch(word.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 1 <= seconds <= 365 * 86400:
        raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected a time such as 2h or 90m, up to 365d")
    return seconds


def count(word: str) -> int:
    """Argparse type: a number of tokens such as 2.5B."""
    value = parse_token_count(word)
    if not value:
        raise argparse.ArgumentTypeError(f"found {shorten(word)!r}; expected a number above 0, such as 2.5B")
    return value


def counts(word: str) -> list[int]:
    """Argparse type: numbers with commas between them, such as 0.5M,2M,8M."""
    return [count(part) for part in word.split(",")]


def _parser() -> Parser:
    parser = Parser(description="Train a few smaller models of a run's family, fit the law L(N, D) of the loss, and "
                                "predict the loss of the run before its launch.",
                    epilog="The command can be given again: finished runs are skipped, others resume.")
    add = parser.add_argument
    add("--target", type=path_text, metavar="FILE", help="YAML of the run to predict")
    add("--budget", type=duration, metavar="TIME", help="time of all smaller runs on this machine, such as 2h")
    add("--out", type=path, default=Path("runs/ladder"), help="folder for all files (default: %(default)s)")
    add("--plan_only", action="store_true", help="measure step times, print the plan, and train nothing")
    add("--parameters", type=counts, metavar="N,N,...",
        help="sizes of the smaller models, without embeddings, such as 0.5M,2M,8M (default: by the budget)")
    add("--tokens", type=count, metavar="N", help="tokens of the longest smaller runs (default: by the budget)")
    add("--ranks", type=whole_number(1, 10**4), metavar="N",
        help="ranks of the smaller runs on this machine (default: its GPUs, or 1)")
    add("--world_size", type=whole_number(1, 10**7), metavar="N", help="ranks of the target's run (default: --ranks)")
    add("--gpu", type=text, metavar="NAME", help="GPU of the target's run, such as h100 (default: this machine)")
    add("--max_extrapolation", type=number(1, 1e6), default=LARGEST_FACTOR, metavar="FACTOR",
        help="reject a target with more than this factor times the parameters, or tokens, of the smaller runs "
             "(default: %(default)g)")
    add("--points", type=path, metavar="FILE",
        help="train nothing: fit the law to a CSV file with the columns run,parameters,tokens,loss[,held_out], and "
             "predict its held-out points, or its largest model")
    add("--mixtures", type=whole_number(1, 1000), metavar="N",
        help="train the target itself, a small run of a blend, with N other weights; predict its losses, and propose "
             "weights")
    return parser


def main() -> int:
    """Run the program and return its exit code. Raises ConfigError."""
    args = _parser().parse_args()
    if args.points is not None or args.mixtures is not None:
        return _without_budget(args)
    for name in ("target", "budget"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name}", problem="it is required, and missing on the command line")
    _check_packages("scipy", "matplotlib")
    ranks = args.ranks or (1 if wants_cpu() else max(1, len(nvidia_smi("name"))))
    target = read_target(args.target, world_size=args.world_size or ranks,
                         device=device_of("cuda" if args.gpu else None, args.gpu))
    wish = Wish(args.budget, args.parameters or (), args.tokens, args.max_extrapolation)
    check_folder(args.out, "--out")
    given = target.plan.args
    say_left_out([*(["extension"] if given.extension else []), *given.extensions])
    try:
        plan = _plan(target, wish, args.out, ranks)
        print("\n".join(plan_lines(plan, target)))
        if not args.plan_only:
            _run(plan, target, args)
    except subprocess.CalledProcessError as error:
        say(f"stopped: {shlex.join(['ds-pretrain', *error.cmd[2:]])} ended with exit code {error.returncode}")
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


def _check_packages(*names: str) -> None:
    """Raise ConfigError before the runs for a package that their evaluation needs."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError("ladder", problem=f"it needs {name}, which is not installed",
                              remedy="pip install 'ds-pretrain[ladder]'")


def _without_budget(args: argparse.Namespace) -> int:
    """Do the backtest of --points, or the runs of --mixtures. Raises ConfigError, also for flags without effect."""
    flag, used = ("points", ("points",)) if args.points is not None else ("mixtures", ("mixtures", "target", "out",
                                                                                        "ranks"))
    for name, value in vars(args).items():
        if name not in used and value != _parser().get_default(name):
            raise ConfigError(f"--{name}", problem=f"it has no effect with --{flag}", remedy="remove one of the two")
    if args.points is not None:
        print("\n".join(backtest_of(args.points).lines()))
        return 0
    if args.target is None:
        raise ConfigError("--mixtures", problem="the blend to train is missing", remedy="give --target run.yaml")
    _check_packages("scipy")
    check_folder(args.out, "--out")
    return mixtures_main(args.target, args.out, args.mixtures, ranks=args.ranks or 1)


def _plan(target: TargetRun, wish: Wish, folder: Path, ranks: int) -> Plan:
    """Return the plan of the folder, or measure times and make one. Raises ConfigError."""
    request = _request(target, wish, ranks)
    file = folder / PLAN_FILE
    if file.exists():
        try:
            plan = build(Plan, read_object(file))
        except (OSError, ValueError) as error:
            raise ConfigError(str(file), problem=f"it cannot be used: {reason_of(error)}",
                              remedy="remove it, and give the command again") from None
        check_reach(plan, target, wish)
        if changed := [name for name, value in request.items() if plan.target.get(name) != value]:
            raise ConfigError(f"--out {folder}", problem="it holds the ladder of other settings, which differ in "
                              f"{', '.join(changed)}", remedy="give another --out")
        return plan
    sizes = family_sizes(target.plan.model)
    if wish.parameters:
        nearest_sizes(sizes, wish.parameters)  # before the time of the measurement
    batch = batch_of(wish.tokens or min(target.tokens, target.data_tokens), target, ranks)
    folder.mkdir(parents=True, exist_ok=True)
    write_settings(target, folder, ranks=ranks)
    if wish.parameters:
        chosen = nearest_sizes(sizes, wish.parameters)
        times = measure_times([chosen[0], chosen[-1]], batch, folder, ranks=ranks)
    else:
        times = measure_times(sizes[:1], batch, folder, ranks=ranks)
        largest = make_plan(target, wish, times, ranks=ranks, request=request).models[-1].name
        probed = [sizes[0], *(size for size in sizes if size.name == largest != sizes[0].name)]
        times = measure_times(probed, batch, folder, ranks=ranks)
    plan = make_plan(target, wish, times, ranks=ranks, request=request)
    write_atomically(file, json.dumps(asdict(plan), indent=1) + "\n")
    return plan


def _request(target: TargetRun, wish: Wish, ranks: int) -> dict[str, Any]:
    """Return what a plan depends on: a folder holds the runs of one plan."""
    plan = target.plan
    flags = {name: value for name, value in plan.args.values().items()
             if value != DEFAULTS[name] and name not in {*_WITHOUT_EFFECT, *plan.args.extensions}}
    found: dict[str, Any] = json.loads(json.dumps({
        "budget_seconds": wish.budget_seconds, "parameters": list(wish.parameters), "tokens": wish.tokens,
        "ranks": ranks, "world_size": plan.layout.world_size, "flags": flags,
        "model": plan.model.hf_config, "deepspeed_config": plan.file.values,
        "data": {name: dataset.fingerprint for name, dataset in plan.datasets.items()}}))
    return found


def _run(plan: Plan, target: TargetRun, args: argparse.Namespace) -> None:
    """Train, fit, predict, and write the results. Raises ConfigError and CalledProcessError."""
    train_ladder(plan, target, args.out)
    ladder = make_ladder(target, read_points(plan, target, args.out))
    write_ladder(args.out / LADDER_FILE, ladder)
    lines, html = page(args.target, target, plan, ladder, args.out, args.gpu)
    write_atomically(args.out / PAGE_FILE, html)
    print("\n".join([*lines, f"written: {args.out / LADDER_FILE}, {args.out / PAGE_FILE}"]))
