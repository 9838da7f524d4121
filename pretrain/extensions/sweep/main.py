"""Search settings by many runs: ds-pretrain sweep sweep.yaml"""

import json

from pretrain.cli import Parser, path_text, say
from pretrain.errors import CRASHED, INTERRUPTED, ConfigError
from pretrain.extensions.sweep.results import print_results, results, write_plots
from pretrain.extensions.sweep.study import STORAGE, Sweep, check_sweep, open_study
from pretrain.extensions.sweep.sweep_file import read_sweep


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
