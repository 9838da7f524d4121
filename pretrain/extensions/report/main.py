"""Curves of runs as a page, live or as a file; a comparison of runs; the script that repeats one."""

import argparse
import json
import time
from pathlib import Path

from pretrain.cli import Parser, path, whole_number
from pretrain.errors import ConfigError
from pretrain.extensions.report.compare import compare_runs, comparison_lines
from pretrain.extensions.report.page import ReportServer, page_html, write_page
from pretrain.extensions.report.page_data import ShownRun, page_data
from pretrain.extensions.report.repeat_command import command_of
from pretrain.monitor.read_run_folder import newest_start
from pretrain.paths import check_file

_MAX_RUNS = 32  # a page with more curves cannot be read


def main() -> int:
    parser = Parser(description="Draw runs as one HTML page without network access, watch them, or compare them.")
    parser.add_argument("runs", nargs="+", type=path, metavar="RUN", help="run folder (--save of the run)")
    parser.add_argument("--output", type=path, metavar="FILE.html", help="default: report.html in the first run folder")
    parser.add_argument("--watch", action="store_true",
                        help="serve the page on 127.0.0.1, and update it while the runs train, until Ctrl-C")
    parser.add_argument("--port", type=whole_number(1, 65535), help="of --watch; default: a free port")
    parser.add_argument("--compare", action="store_true",
                        help="print the settings that differ, and where the losses diverge")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--command", action="store_true",
                        help="print a script that repeats the newest start of one run")
    args = parser.parse_args()
    _check_flags(args)
    if args.compare:
        comparison = compare_runs(args.runs)
        print(json.dumps(comparison.as_json(), indent=1) if args.json else "\n".join(comparison_lines(comparison)))
    elif args.command:
        print(_command(args.runs[0]), end="")
    elif args.watch:
        _watch(args.runs, args.port or 0)
    else:
        _write(args.runs, args.output or args.runs[0] / "report.html")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that would have no effect."""
    modes = [name for name in ("watch", "compare", "command") if getattr(args, name)]
    if len(modes) > 1:
        raise ConfigError(f"--{modes[1]}", problem=f"it cannot be combined with --{modes[0]}",
                          remedy="give one of them")
    for name, mode in (("port", "watch"), ("json", "compare")):
        if getattr(args, name) and not getattr(args, mode):
            raise ConfigError(f"--{name}", problem=f"it has no effect without --{mode}", remedy=f"add --{mode}")
    if args.output is not None:
        if modes:
            raise ConfigError("--output", problem=f"it has no effect with --{modes[0]}, which writes no page")
        if args.output.suffix.lower() not in (".html", ".htm"):
            raise ConfigError("--output", found=str(args.output), expected="a file name that ends with .html")
    if args.compare and len(args.runs) < 2:
        raise ConfigError("--compare", problem="it needs at least two run folders")
    if args.command and len(args.runs) > 1:
        raise ConfigError("--command", problem="it takes one run folder", remedy="call the program once for each run")
    if len(args.runs) > _MAX_RUNS:
        raise ConfigError("command line", found=f"{len(args.runs)} run folders", expected=f"at most {_MAX_RUNS}")


def _command(run: Path) -> str:
    record = newest_start(run)
    try:
        return command_of(record, run)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(str(run / "run.json"), problem=f"the newest record lacks what a repetition needs "
                          f"({type(error).__name__}: {error})") from None


def _write(runs: list[Path], target: Path) -> None:
    begin = time.perf_counter()
    tables = [ShownRun(run) for run in runs]
    check_file(target, "--output")
    text = page_html(page_data(tables, watch=False))
    write_page(text, target)
    rows = sum(table.training.num_rows for table in tables)
    print(f"wrote {target} ({len(text) / 1e6:.1f} MB, {rows:,} rows, {time.perf_counter() - begin:.1f} s)")


def _watch(runs: list[Path], port: int) -> None:
    with ReportServer([ShownRun(run) for run in runs], port) as server:
        print(f"{server.url} shows the newest rows; Ctrl-C ends this program", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print()
