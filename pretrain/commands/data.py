"""Token files: describe, hash, verify, merge and split them. Extensions add subcommands."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.active_extensions import extend_parser
from pretrain.cli import (
    LARGEST_INT,
    Parser,
    StopRequest,
    new_prefix,
    next_line,
    prefix,
    say,
    stop_on_signals,
    text,
    whole_number,
)
from pretrain.commands.next_command import after_prepare
from pretrain.data.merge_split import merge, split
from pretrain.data.prepare.merge_shards import merge_shards, open_shards, steps_of_shards
from pretrain.data.prepare.shards import named_shards
from pretrain.data.prepare.summary import summary_text
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.inspect_files import describe, store_hashes, verify_data
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import STOPPED
from pretrain.progress import ProgressBar


def _info(flags: argparse.Namespace) -> int:
    for name in flags.prefixes:
        data = IndexedDataset(name)
        with ProgressBar(f"reading the index of {name}", 16 * data.num_documents) as progress:
            rows = describe(data, progress.advance)
        print(name)
        for key, value in rows:
            print(f"  {key:<19}{value}")
    return 0


def _hash(flags: argparse.Namespace) -> int:
    for name in flags.prefixes:
        with ProgressBar(f"hashing {name}", bin_bytes([name])) as progress:
            hashes = store_hashes(name, progress.advance)
        print(f"{name}: SHA-256 {hashes.sha256}, written to {name}.sha256.json")
    return 0


def _verify(flags: argparse.Namespace) -> int:
    code = 0
    for name in flags.prefixes:
        with ProgressBar(f"verifying {name}", bin_bytes([name])) as progress:
            lines, summary = verify_data(name, progress.advance)
        for line in lines or [f"{name}: {summary}"]:
            print(line)
        code = 1 if lines else code
    return code


def _merge(flags: argparse.Namespace) -> int:
    if (shards := named_shards(flags.output, flags.prefixes)) is not None:
        return _merge_shards(flags, shards)
    with stop_on_signals(), ProgressBar(f"merging into {flags.output}", bin_bytes(flags.prefixes)) as progress:
        writer, notes = merge(flags.output, flags.prefixes, overwrite=flags.overwrite, advance=progress.advance)
    for note in notes:
        print(f"note: {note}")
    print_written([writer])
    return 0


def _merge_shards(flags: argparse.Namespace, prefixes: list[str]) -> int:
    with stop_on_signals():
        shards = open_shards(prefixes)
        steps = steps_of_shards(shards)
        with ProgressBar(f"merging into {flags.output}", bin_bytes(prefixes)) as progress:
            merge_shards(flags.output, shards, steps=steps, overwrite=flags.overwrite, advance=progress.advance)
    print("\n".join([summary_text(flags.output, steps), *next_line(after_prepare(flags.output))]))
    return 0


def _split(flags: argparse.Namespace) -> int:
    with stop_on_signals(), ProgressBar(f"splitting {flags.prefix}", bin_bytes([flags.prefix])) as progress:
        writers = split(flags.prefix, flags.out, proportions=flags.proportions, documents=flags.documents,
                        seed=flags.seed, overwrite=flags.overwrite, advance=progress.advance)
    print_written(writers)
    return 0


def print_written(writers: Sequence[IndexedWriter]) -> None:
    """Print the counts of data sets that were written."""
    for writer in writers:
        print(f"{writer.prefix}: documents: {writer.num_documents:,}; tokens: {writer.num_tokens:,} of {writer.dtype}")


def bin_bytes(names: Sequence[str]) -> int:
    """Return the bytes of the .bin files of data sets, for progress bars."""
    paths = [Path(f"{name}.bin") for name in names]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data_parser() -> Parser:
    parser = Parser(description="Describe, hash, verify, merge and split data sets.",
                    epilog="Exit codes: 0 success; 1 a data set does not have its hashes; 2 bad input, also a damaged "
                           ".bin or .idx; 75 stopped by a signal.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    help_of_prefix = "path of the data set, without .bin"
    for name, function, description in (
            ("info", _info, "print the counts, the lengths of documents, the tokenizer and the hash"),
            ("hash", _hash, "write PREFIX.sha256.json, the hashes of every byte"),
            ("verify", _verify, "check every entry of the .idx, and compare every byte with PREFIX.sha256.json")):
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(function=function)
        command.add_argument("prefixes", metavar="PREFIX", nargs="+", type=prefix, help=help_of_prefix)
    command = commands.add_parser("merge", help="write the documents of several data sets into one",
                                  description="Write the documents of several data sets into one, in this order. "
                                              "The tokens get the widest of their types. Without PREFIX, or with the "
                                              "shards of `prepare --shard`, write the files that a preparation on one "
                                              "machine would have written.")
    command.set_defaults(function=_merge)
    command.add_argument("output", metavar="OUT", type=new_prefix, help="path of the new data set, without .bin")
    command.add_argument("prefixes", metavar="PREFIX", nargs="*", type=prefix,
                         help=f"{help_of_prefix} (default: the shards of OUT)")
    add_overwrite(command)
    command = commands.add_parser("split", help="divide the documents of a data set among several",
                                  description="Divide the documents of a data set among several.")
    command.set_defaults(function=_split)
    command.add_argument("prefix", metavar="PREFIX", type=prefix, help=help_of_prefix)
    command.add_argument("--out", required=True, metavar="OUT", nargs="+", type=new_prefix,
                         help="paths of the new data sets, without .bin")
    sizes = command.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--proportions", type=text, metavar="P,P...", help="proportions of the documents: 969,30,1")
    sizes.add_argument("--documents", type=text, metavar="N,N...",
                       help="numbers of documents. One of them may be the word rest: rest,1000")
    command.add_argument("--seed", type=whole_number(0, LARGEST_INT),
                         help="choose the documents at random, with this seed; they keep their order. Without it, the "
                              "parts are consecutive documents, those of the flag --split of a run")
    add_overwrite(command)
    extend_parser("data", commands)
    return parser


def add_overwrite(command: argparse.ArgumentParser) -> None:
    """Add the flag of all subcommands that write data sets."""
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


def main() -> int:
    flags: argparse.Namespace = _data_parser().parse_args()
    try:
        code: int = flags.function(flags)
    except StopRequest as stop:
        say(f"stopped by {stop.name}: give the same command again")
        return STOPPED
    return code
