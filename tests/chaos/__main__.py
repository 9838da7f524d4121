"""Inject random faults into a run: python -m tests.chaos [flags] -- COMMAND...

COMMAND is any command that starts pretrain/train.py on this host.
"""

import sys

from pretrain.cli import LONGEST_SECONDS, Parser, number, run_main, text, whole_number
from pretrain.cluster.supervise.launch_command import with_separator
from pretrain.progress import terminal_console
from tests.chaos.faults import KINDS
from tests.chaos.results import report_lines, report_table
from tests.chaos.run import RESULT, make_settings, run_chaos


def main() -> int:
    """Return 0 if the run ended like a run without faults and nothing was lost, and 1 otherwise. Raises ConfigError."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = Parser(prog="python -m tests.chaos", usage="%(prog)s [flags] -- COMMAND...",
                    description="Runs COMMAND twice under the supervisor, without faults and with random faults, and "
                                "compares losses and final weights. Never use the folder of a run that matters.",
                    epilog="Kinds of faults: " + "; ".join(f"{each.name}: {each.about}" for each in KINDS.values()))
    parser.add_argument("--faults", type=whole_number(1, 100_000), default=200, help="number of faults (default: 200)")
    parser.add_argument("--seed", type=whole_number(), default=0,
                        help="the same seed gives the same faults, as far as timing allows (default: 0)")
    parser.add_argument("--kinds", type=text, metavar="A,B", help="kinds of faults (default: all that are possible)")
    parser.add_argument("--stall_s", type=number(1, LONGEST_SECONDS), default=900.0,
                        help="end the run after this time in seconds without a step, start or fault (default: 900)")
    args = parser.parse_args(words[:end])
    settings = make_settings(with_separator(words[end + 1:]), kinds=args.kinds, faults=args.faults, seed=args.seed,
                             stall_s=args.stall_s)
    result = run_chaos(settings, lambda line: print(f"chaos: {line}", file=sys.stderr, flush=True))
    console = terminal_console(width=160)
    console.print(report_table(result))
    for line in report_lines(result):
        console.print(line)
    console.print(f"details: {settings.run / RESULT}")
    return 1 if result.problems() else 0


if __name__ == "__main__":
    run_main(main)
