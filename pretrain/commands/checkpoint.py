"""List, verify, prune, consolidate and compare checkpoints. No command needs a GPU.

Exit codes: 0 success; 1 a checkpoint is damaged, has NaN or differs; 2 bad input.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from pretrain.active_extensions import extend_parser
from pretrain.checkpoint.convert.new_folder import output_summary
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.format.manifest import NOT_FINITE, Manifest
from pretrain.checkpoint.format.run_checkpoints import LATEST_FILE, latest_problem, step_of
from pretrain.checkpoint.format.verify import damage_of
from pretrain.checkpoint.load.find_checkpoint import (
    find_checkpoint,
    find_checkpoints,
    find_checkpoints_folder,
    is_checkpoint,
)
from pretrain.checkpoint.save.retention import prune
from pretrain.cli import Parser, path, whole_number
from pretrain.config.layout import DTYPE_BYTES
from pretrain.errors import ConfigError, SaveError
from pretrain.progress import ProgressBar, terminal_console

_RUN_HELP = "run folder, its checkpoints folder, or one global_stepN folder"
CHECKPOINT_HELP = "global_stepN folder, or run folder for its newest good checkpoint"
_FINITE = {True: "yes", False: "no", None: ""}
_LOG_WIDTH = 200  # columns of the table if the output is not a terminal


def _list(args: argparse.Namespace) -> int:
    table = Table("step", "MB", "layout", "precision", "eval loss", "finite", "complete", box=None, pad_edge=False)
    checkpoints = find_checkpoints(args.run)
    for folder, found in checkpoints:
        if isinstance(found, ConfigError):
            name = str(step_of(folder)) if step_of(folder) >= 0 else folder.name
            table.add_row(name, "", "", "", "", "", "no")
        else:
            loss = "" if found.eval_loss is None else f"{found.eval_loss:.4f}"
            table.add_row(str(found.step), f"{found.num_bytes / 1e6:,.1f}", found.layout_text,
                          found.precision, loss, _FINITE[found.finite], "yes")
    terminal_console(width=_LOG_WIDTH).print(table)
    errors = [found for _, found in checkpoints if isinstance(found, ConfigError)]
    for error in errors:
        print(error)
    return 1 if errors else 0


def _verify(args: argparse.Namespace) -> int:
    """Verify the checkpoints and, in a run folder, the file `latest`. Return 1 if one is damaged or has NaN, else 0."""
    good: list[Path] = []
    code = 0
    for folder, found in find_checkpoints(args.run):
        if isinstance(found, ConfigError):
            print(found)
            code = 1
        elif verify_and_print(folder, found) or not found.is_good:
            code = 1
        elif not found.weights_only:
            good.append(folder)
    if good and not is_checkpoint(args.run) and _should_have_latest(good[0].parent):
        problem = latest_problem(good[0].parent, good[0])
        if problem is not None:
            print(problem)
            code = 1
    return code


def _should_have_latest(checkpoints: Path) -> bool:
    """Return whether this is the checkpoints folder of a run. A mirror has no file `latest`."""
    return checkpoints.resolve().name == "checkpoints" or (checkpoints / LATEST_FILE).exists()


def verify_and_print(folder: Path, manifest: Manifest, notes: Sequence[str] = ()) -> int:
    """Print the notes about a checkpoint, read every file and print each problem. Return 1 if it is damaged, else 0."""
    for note in notes:
        print(note)
    with ProgressBar(f"verifying {folder.name}", manifest.num_bytes) as progress:
        problems = damage_of(folder, manifest, progress.advance)
    if not problems:
        line = f"{folder}: complete, {len(manifest.files)} files, {manifest.num_bytes / 1e6:,.1f} MB"
        print(line if manifest.is_good else f"{line}, but {NOT_FINITE}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _prune(args: argparse.Namespace) -> int:
    if is_checkpoint(args.run):
        raise ConfigError(str(args.run), problem="this is a single checkpoint",
                          remedy="name a run folder or its checkpoints folder")
    find_checkpoints(args.run)
    try:
        removed = prune(find_checkpoints_folder(args.run), keep_checkpoints=args.keep_checkpoints,
                        keep_every=args.keep_every, keep_best=args.keep_best, verified=set())
    except SaveError as error:
        print(error)
        return 1
    for folder in removed:
        print(f"removed {folder}")
    print(f"{len(removed)} removed, {len(find_checkpoints(args.run))} kept")
    return 0


def _consolidate(args: argparse.Namespace) -> int:
    source = find_checkpoint(args.checkpoint)
    plan = plan_export(source[0], args.out, dtype=args.dtype, with_tokenizer=False)
    if verify_and_print(*source):
        return 1
    from pretrain.checkpoint.convert.export_hf import consolidate

    consolidate(plan)
    print(output_summary(args.out))
    return 0


def _diff(args: argparse.Namespace) -> int:
    a, b = find_checkpoint(args.a), find_checkpoint(args.b)
    if max(verify_and_print(*a), verify_and_print(*b)):
        return 1
    from pretrain.checkpoint.convert.diff import diff

    differences = diff(a[0], b[0])
    for difference in differences:
        print(difference)
    if not differences:
        print("no difference")
    return 1 if differences else 0


def _parser() -> Parser:
    parser = Parser(description="List, verify, prune, consolidate and compare checkpoints, without GPUs.",
                    epilog="Exit codes: 0 success; 1 a checkpoint is damaged, has NaN or differs; 2 bad input.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        return command

    for name, function, text in (("list", _list, "print a table of the checkpoints"),
                                 ("verify", _verify, "read every file and compare its hash")):
        add(name, function, text).add_argument("run", metavar="RUN", type=path, help=_RUN_HELP)
    pruning = add("prune", _prune, "remove old checkpoints, after verifying the newest two that remain")
    pruning.add_argument("run", metavar="RUN", type=path, help="run folder, or its checkpoints folder")
    count = whole_number()
    pruning.add_argument("--keep_checkpoints", type=count, required=True,
                         help="keep the newest N checkpoints, but at least two; 0: keep all")
    pruning.add_argument("--keep_every", type=count, default=0,
                         help="also keep checkpoints whose step is a multiple of N; 0: off")
    pruning.add_argument("--keep_best", type=count, default=0,
                         help="also keep the N checkpoints with the lowest validation loss")
    merging = add("consolidate", _consolidate, "write only weights and config.json, as transformers loads them")
    merging.add_argument("checkpoint", type=path, help=CHECKPOINT_HELP)
    merging.add_argument("out", type=path, help="new folder")
    merging.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="fp32",
                         help="data type of the weights (default: %(default)s)")
    comparing = add("diff", _diff, "compare the weights and optimizer states of two checkpoints")
    comparing.add_argument("a", type=path, help=CHECKPOINT_HELP)
    comparing.add_argument("b", type=path, help=CHECKPOINT_HELP)
    extend_parser("checkpoint", commands)
    return parser


def main() -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    args = _parser().parse_args()
    return int(args.function(args))

