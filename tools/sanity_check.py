#!/usr/bin/env python3
"""Check a run before it is trained: loss, labels, mask, gradients, and short trainings, on engines of its own.

    python tools/sanity_check.py --config run.yaml
    ds-pretrain --num_accelerators 2 tools/sanity_check.py --config run.yaml

It takes the flags of pretrain/train.py. Any launcher may start the ranks. The run folder is not changed.
Exit codes: 0 all checks passed; 1 a check failed; 2 the run is rejected.
"""

import json
import sys
from pathlib import Path

if __name__ == "__main__":  # find the package from any working directory, also without an installation
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pretrain.checkpoint.load.start import check_start
from pretrain.cli import Parser, path, run_main, whole_number
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import detect_device
from pretrain.distributed.print_error import run_or_reject
from pretrain.distributed.world import World
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.paths import check_file
from pretrain.terminal import clear_status, status

_USAGE = """tools/sanity_check.py [--overfit_steps N] [--json FILE] and the flags of pretrain/train.py

  --overfit_steps N   largest number of steps in which one small batch must be learned (default: 100)
  --json FILE         also write the results to this file
"""


def _run(words: list[str], world: World) -> int:
    """Validate the run, then import torch and run the checks. Raises ConfigError."""
    own = Parser(add_help=False)
    own.add_argument("--overfit_steps", type=whole_number(2, 10**6), default=100)
    own.add_argument("--json", type=path)
    known, rest = own.parse_known_args(words)
    if known.json is not None:
        check_file(known.json, "--json")
    device = detect_device()
    start = check_start(parse_arguments(rest), world_size=world.size, device=device)
    status("loading torch and DeepSpeed")
    prepare_deepspeed(device)
    from pretrain.analysis.sanity.result import as_json, failed_checks, print_table
    from pretrain.analysis.sanity.run_checks import run_checks
    from pretrain.analysis.trial_run import trial_run

    with trial_run(start, world) as (plan, build):
        results = run_checks(plan, build, steps=known.overfit_steps,
                             report=lambda activity: status(f"sanity check: {activity}"))
    clear_status()
    if world.rank == 0:
        print_table(results)
        if known.json is not None:
            known.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    return 1 if failed_checks(results) else 0


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(_USAGE)
    return run_or_reject(lambda world: _run(words, world))


if __name__ == "__main__":
    run_main(main)
