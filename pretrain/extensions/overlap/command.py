"""Find text of evaluation sets in token files: the flags and the output of `ds-pretrain data overlap`."""

import argparse
import json
import os

from pretrain.cli import path, path_text, prefix, stop_on_signals, text, whole_number
from pretrain.commands.data import add_overwrite, bin_bytes, print_written
from pretrain.data.text_inputs.chunk import FORMATS, ReadSettings, parse_separator
from pretrain.errors import ConfigError
from pretrain.extensions.overlap.find_overlap import find_overlap, open_train, remove_overlap
from pretrain.paths import check_file
from pretrain.progress import ProgressBar


def add_overlap(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand to those of `ds-pretrain data`."""
    command = commands.add_parser(
        "overlap", help="find the documents that contain text of evaluation sets",
        description="Find the documents of training data that contain text of evaluation sets (contamination): runs of "
                    "N tokens that both have.")
    add = command.add_argument
    command.set_defaults(function=_overlap)
    add("prefix", metavar="PREFIX", type=prefix, help="path of the training data, without .bin")
    add("--against", required=True, metavar="EVAL", nargs="+", type=path_text,
        help="evaluation sets: token files (the path without .bin), or text, JSON lines or Parquet as ds-pretrain "
             "prepare reads it: a file, a folder, a glob in quotes")
    add("--ngram", type=whole_number(2, 1000), default=13, metavar="N",
        help="tokens of a match (default: %(default)s)")
    add("--max_documents", type=whole_number(1, 10**9), default=10, metavar="N",
        help="a run of tokens in more training documents is no match, but something like a license or a menu "
             "(default: %(default)s)")
    add("--remove", action="store_true", help="write the training documents without a match to --out")
    add("--out", type=prefix, metavar="PREFIX", help="path of the data set that --remove writes, without .bin")
    add_overwrite(command)
    add("--json", type=path, metavar="FILE", help="also write the report to this file")
    add("--tokenizer", type=path_text, metavar="PATH",
        help="tokenizer of the training data, for text (default: the one that PREFIX.meta.json names)")
    add("--format", choices=FORMATS, default="auto", help="format of text (default: %(default)s, by its content)")
    add("--jsonl_key", type=text, default="text",
        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    add("--document_separator", type=text,
        help=r"text between two documents of a text file, such as '\n\n' (default: a file is one document)")
    add("--workers", type=whole_number(1, 1024), help="worker processes (default: one per CPU core)")


def _overlap(flags: argparse.Namespace) -> int:
    if flags.remove != (flags.out is not None):
        raise ConfigError("--remove" if flags.remove else "--out", problem="--remove writes the documents without a "
                          "match to a new data set, --out", remedy="give both flags or none")
    if flags.json is not None:
        check_file(flags.json, "--json")
    separator = parse_separator(flags.document_separator) if flags.document_separator else ""
    train = open_train(flags.prefix, flags.out, overwrite=flags.overwrite)
    with stop_on_signals():
        with ProgressBar(f"searching {flags.prefix}", bin_bytes([flags.prefix])) as progress:
            result = find_overlap(train, flags.against, n=flags.ngram, most_documents=flags.max_documents,
                                  tokenizer=flags.tokenizer, workers=flags.workers or len(os.sched_getaffinity(0)),
                                  read=ReadSettings(flags.format, flags.jsonl_key, separator),
                                  advance=progress.advance)
        print("\n".join([*result.lines(), *(f"note: {note}" for note in result.notes)]))
        if flags.json is not None:
            flags.json.write_text(json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8",
                                  errors="backslashreplace")
        if flags.remove:
            with ProgressBar(f"writing {flags.out}", bin_bytes([flags.prefix])) as progress:
                print_written([remove_overlap(result, flags.out, progress.advance)])
    return 0
