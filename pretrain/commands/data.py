"""Token files: describe, hash and verify them. Extensions add subcommands."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.active_extensions import extend_parser
from pretrain.cli import (
    Parser,
    StopRequest,
    prefix,
    say,
)
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


def print_written(writers: Sequence[IndexedWriter]) -> None:
    """Print the counts of data sets that were written."""
    for writer in writers:
        print(f"{writer.prefix}: documents: {writer.num_documents:,}; tokens: {writer.num_tokens:,} of {writer.dtype}")


def bin_bytes(names: Sequence[str]) -> int:
    """Return the bytes of the .bin files of data sets, for progress bars."""
    paths = [Path(f"{name}.bin") for name in names]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data_parser() -> Parser:
    parser = Parser(description="Describe, hash and verify data sets; extensions add more.",
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
