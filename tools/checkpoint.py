#!/usr/bin/env python3
"""Look after checkpoints, without GPUs: list, verify, prune, convert, diff, consolidate.

Exit codes: 0 all is well; 1 something is damaged or differs; 2 bad input.
"""

import argparse
import os
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from pretrain.checkpoint.convert.commands import check_new_folder, layout, verify, written
from pretrain.checkpoint.load.select import (
    FoundCheckpoint,
    find_checkpoint,
    find_checkpoints,
    find_checkpoints_folder,
    is_checkpoint,
)
from pretrain.checkpoint.save.retention import prune
from pretrain.cli import Parser, path, run_main, whole_number
from pretrain.console.progress import Progress
from pretrain.errors import ConfigError, SaveError

_RUN = "run folder, its checkpoints folder, or one global_stepN folder"
_CHECKPOINT = "global_stepN folder; of a run folder the newest whole one is taken"


def _list(args: argparse.Namespace) -> int:
    table = Table("step", "MB", "layout", "precision", "eval loss", "whole", box=None, pad_edge=False)
    checkpoints = find_checkpoints(args.run)
    for found in checkpoints:
        if found.manifest is None:
            table.add_row(found.folder.name.removeprefix("global_step"), "", "", "", "", "no")
        else:
            loss = "" if found.manifest.eval_loss is None else f"{found.manifest.eval_loss:.4f}"
            table.add_row(str(found.manifest.step), f"{found.num_bytes / 1e6:,.1f}", layout(found.manifest),
                          found.manifest.precision, loss, "yes")
    # a log has no width that a row could be cut to
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    complaints = [found.complaint for found in checkpoints if found.manifest is None]
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


def _verify(args: argparse.Namespace) -> int:
    return max(_verified(found) for found in find_checkpoints(args.run))


def _verified(found: FoundCheckpoint) -> int:
    """Read every file; 0, or what is wrong is printed and 1."""
    with Progress(f"verifying {found.folder.name}", found.num_bytes) as progress:
        complaints = verify(found, progress.advance)
    if found.manifest is not None and not complaints:
        print(f"{found.folder}: whole, {len(found.manifest.files)} files, {found.num_bytes / 1e6:,.1f} MB")
    for complaint in complaints:
        print(complaint)
    return 1 if complaints else 0


def _prune(args: argparse.Namespace) -> int:
    if is_checkpoint(args.run) or not find_checkpoints(args.run):
        raise ConfigError(str(args.run), found="one checkpoint", expected="a run's folder, or its checkpoints folder")
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


def _convert(args: argparse.Namespace) -> int:
    source = find_checkpoint(args.checkpoint)
    check_new_folder(args.out)
    if _verified(source):
        return 1
    from pretrain.checkpoint.convert.export import convert

    convert(source.folder, args.out)
    print(written(args.out))
    return 0


def _consolidate(args: argparse.Namespace) -> int:
    source = find_checkpoint(args.checkpoint)
    check_new_folder(args.out)
    if _verified(source):
        return 1
    from pretrain.checkpoint.convert.export import consolidate

    consolidate(source.folder, args.out, dtype=args.dtype)
    print(written(args.out))
    return 0


def _diff(args: argparse.Namespace) -> int:
    a, b = find_checkpoint(args.a), find_checkpoint(args.b)
    if max(_verified(a), _verified(b)):
        return 1
    from pretrain.checkpoint.convert.export import diff

    differences = diff(a.folder, b.folder)
    for difference in differences:
        print(difference)
    if not differences:
        print("no difference")
    return 1 if differences else 0


def _parser() -> Parser:
    parser = Parser(description="Look after checkpoints, without GPUs.",
                    epilog="Exit codes: 0 all is well; 1 something is damaged or differs; 2 bad input.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, does: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(does=does)
        return command

    add("list", _list, "a table of the checkpoints").add_argument("run", type=path, help=_RUN)
    add("verify", _verify, "read every file and compare its hash").add_argument("run", type=path, help=_RUN)
    pruning = add("prune", _prune, "remove old checkpoints, once the newest two that stay are verified")
    pruning.add_argument("run", type=path, help="run folder, or its checkpoints folder")
    count = whole_number()
    pruning.add_argument("--keep_checkpoints", type=count, required=True, help="the newest K stay; at least two do")
    pruning.add_argument("--keep_every", type=count, default=0, help="those of every Nth step stay too; 0: off")
    pruning.add_argument("--keep_best", type=count, default=0, help="the N of lowest validation loss stay too")
    converting = add("convert", _convert, "to DeepSpeed's universal format, for plain DeepSpeed")
    converting.add_argument("checkpoint", type=path, help=_CHECKPOINT)
    converting.add_argument("out", type=path, help="new folder")
    merging = add("consolidate", _consolidate, "the weights alone, whole, as safetensors")
    merging.add_argument("checkpoint", type=path, help=_CHECKPOINT)
    merging.add_argument("out", type=path, help="new folder")
    merging.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32",
                         help="of the weights (default: %(default)s)")
    comparing = add("diff", _diff, "compare weights and optimizer states, across layouts")
    comparing.add_argument("a", type=path, help=_CHECKPOINT)
    comparing.add_argument("b", type=path, help=_CHECKPOINT)
    return parser


def main() -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no command needs a GPU; DeepSpeed warns where it has to guess
    args = _parser().parse_args()
    return int(args.does(args))


if __name__ == "__main__":
    run_main(main)
