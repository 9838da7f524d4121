"""Short trainings before a run: sanity checks, and a search for the learning rate.

    ds-pretrain sanity --config run.yaml
    ds-pretrain find-lr --num_accelerators 2 --from 1e-6 --to 1 --steps 100 --config run.yaml

Both take the flags of `ds-pretrain train`. Any launcher may start the ranks. The run folder is not changed.
Exit codes: 0 all checks passed, or a rate is suggested; 1 a check failed, or no rate is suggested; 2 rejected.
"""

import argparse
import json
import sys

from pretrain.analysis.svg import check_plot_target
from pretrain.checkpoint.load.start import check_start
from pretrain.cli import Parser, number, path, whole_number
from pretrain.config.flags.parse import parse_arguments, parse_before_run
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import run_or_reject
from pretrain.distributed.world import World
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.extensions.sanity.lr_range import evaluate_range, plot_range, range_lines, write_range_json
from pretrain.paths import check_file
from pretrain.terminal import clear_status, status


def _sanity_run(words: list[str], world: World) -> int:
    """Validate the run, then import torch and run the checks. Raises ConfigError."""
    own = Parser(add_help=False, usage="ds-pretrain sanity [flags] [flags of a run]")
    own.add_argument("--overfit_steps", type=whole_number(2, 10**6), default=1000, metavar="N",
                     help="largest number of steps in which one small batch must be learned (default: %(default)s)")
    own.add_argument("--json", type=path, metavar="FILE", help="also write the results to this file")
    known, rest = parse_before_run(own, words)
    if known.json is not None:
        check_file(known.json, "--json")
    device = detect_device()
    start = check_start(parse_arguments(rest), world_size=world.size, device=device)
    status("loading torch and DeepSpeed")
    prepare_deepspeed(device)
    from pretrain.extensions.sanity.extension import as_json, failed_checks, print_table
    from pretrain.extensions.sanity.run_checks import run_checks, trial_run

    with trial_run(start, world, f"ds-pretrain sanity --overfit_steps {known.overfit_steps}") as (plan, build):
        results = run_checks(plan, build, steps=known.overfit_steps,
                             report=lambda activity: status(f"sanity check: {activity}"))
    clear_status()
    if world.rank == 0:
        print_table(results)
        if known.json is not None:
            known.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    return 1 if failed_checks(results) else 0


def sanity_main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_or_reject(lambda world: _sanity_run(words, world))


def _own_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this program, and of a run. Raises ConfigError."""
    parser = Parser(add_help=False, usage="ds-pretrain find-lr [flags] [flags of a run]")
    add = parser.add_argument
    add("--from", dest="low", type=number(0, 1e6, above=True), default=1e-6, metavar="LR",
        help="rate of the first step (default: %(default)s)")
    add("--to", dest="high", type=number(0, 1e6, above=True), default=1.0, metavar="LR",
        help="rate of the last step (default: %(default)s)")
    add("--steps", type=whole_number(3, 10**6), default=100, metavar="N",
        help="steps of the test, which stops earlier if the loss diverges (default: %(default)s)")
    add("--json", type=path, metavar="FILE", help="also write rates, losses and results to this file")
    add("--plot", type=path, metavar="FILE.svg", help="draw the losses over the rates (needs matplotlib)")
    known, rest = parse_before_run(parser, words)
    if known.high <= known.low:
        raise ConfigError("--to", found=f"{known.high:g}", expected=f"a rate above --from, {known.low:g}")
    for target, flag in ((known.json, "--json"), (known.plot, "--plot")):
        if target is not None:
            check_file(target, flag)
    if known.plot is not None:
        check_plot_target(known.plot)
    return known, rest


def _find_lr_run(words: list[str], world: World) -> int:
    """Validate the run, then import torch and make the test. Raises ConfigError."""
    own, rest = _own_flags(words)
    device = detect_device()
    start = check_start(parse_arguments(rest), world_size=world.size, device=device)
    status("loading torch and DeepSpeed")
    prepare_deepspeed(device)
    from pretrain.engine.build import deepspeed_output
    from pretrain.extensions.sanity.run_checks import sweep, trial_run

    program = f"ds-pretrain find-lr --from {own.low:g} --to {own.high:g} --steps {own.steps}"
    with trial_run(start, world, program) as (plan, build), deepspeed_output(start.plan.args.deepspeed_log_level):
        status("building the engine")
        points = sweep(build(plan), plan, low=own.low, high=own.high, steps=own.steps, report=status)
    clear_status()
    test = evaluate_range(points)
    if world.rank == 0:
        print("\n".join(range_lines(test)), flush=True)
        if own.json is not None:
            write_range_json(own.json, test)
        if own.plot is not None:
            plot_range(own.plot, test)
    return 0 if test.suggested is not None else 1


def find_lr_main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_or_reject(lambda world: _find_lr_run(words, world))
