#!/usr/bin/env python3
"""Hash and verify data sets: pairs of .bin and .idx files. No command needs a GPU.

Exit codes: 0 success; 1 a data set does not have its hashes; 2 bad input.
"""

import argparse
from pathlib import Path

from pretrain.cli import Parser, prefix, run_main
from pretrain.data.files.verify import store_hashes, verify_data
from pretrain.terminal.progress import ProgressBar


def _hash(name: str) -> int:
    with ProgressBar(f"hashing {name}", _bin_bytes(name)) as progress:
        hashes = store_hashes(name, progress.advance)
    print(f"{name}: SHA-256 {hashes.sha256}, written to {name}.sha256.json")
    return 0


def _verify(name: str) -> int:
    with ProgressBar(f"verifying {name}", _bin_bytes(name)) as progress:
        lines = verify_data(name, progress.advance)
    for line in lines or [f"{name}: every byte has its hash"]:
        print(line)
    return 1 if lines else 0


def _bin_bytes(name: str) -> int:
    path = Path(f"{name}.bin")
    return path.stat().st_size if path.is_file() else 0


def _parser() -> Parser:
    parser = Parser(description="Hash and verify data sets.",
                    epilog="Exit codes: 0 success; 1 a data set does not have its hashes; 2 bad input.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (("hash", _hash, "write PREFIX.sha256.json, the hashes of every byte"),
                                 ("verify", _verify, "compare every byte with PREFIX.sha256.json")):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(function=function)
        command.add_argument("prefixes", metavar="PREFIX", nargs="+", type=prefix,
                             help="path of the data set, without .bin")
    return parser


def main() -> int:
    args: argparse.Namespace = _parser().parse_args()
    return max(args.function(name) for name in args.prefixes)


if __name__ == "__main__":
    run_main(main)
