"""Token files: describe, hash, verify, merge and split them; look at their documents, and at the tensors of a step."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from pretrain.analysis.inspect_documents import inspect_documents, report_lines, write_page
from pretrain.analysis.recorded_data import find_step, open_data_of_step
from pretrain.cli import (
    LARGEST_INT,
    Parser,
    StopRequest,
    next_line,
    path,
    prefix,
    say,
    stop_on_signals,
    text,
    whole_number,
)
from pretrain.commands.next_command import after_prepare
from pretrain.data.merge_split import merge, split
from pretrain.data.prepare.merge_shards import merge_shards, named_shards, open_shards
from pretrain.data.prepare.summary import summary_text
from pretrain.data.source_facts import end_notes, learnable_notes, source_facts
from pretrain.data.token_files.indexed_dataset import IndexedDataset, read_meta
from pretrain.data.token_files.inspect_files import describe, store_hashes, verify_data
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import STOPPED
from pretrain.paths import check_folder
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
        with ProgressBar(f"hashing {name}", _bin_bytes([name])) as progress:
            hashes = store_hashes(name, progress.advance)
        print(f"{name}: SHA-256 {hashes.sha256}, written to {name}.sha256.json")
    return 0


def _verify(flags: argparse.Namespace) -> int:
    code = 0
    for name in flags.prefixes:
        with ProgressBar(f"verifying {name}", _bin_bytes([name])) as progress:
            lines, summary = verify_data(name, progress.advance)
        for line in lines or [f"{name}: {summary}"]:
            print(line)
        code = 1 if lines else code
    return code


def _merge(flags: argparse.Namespace) -> int:
    if (shards := named_shards(flags.output, flags.prefixes)) is not None:
        return _merge_shards(flags, shards)
    with stop_on_signals(), ProgressBar(f"merging into {flags.output}", _bin_bytes(flags.prefixes)) as progress:
        writer, notes = merge(flags.output, flags.prefixes, overwrite=flags.overwrite, advance=progress.advance)
    for note in notes:
        print(f"note: {note}")
    _print_written([writer])
    return 0


def _merge_shards(flags: argparse.Namespace, prefixes: list[str]) -> int:
    with stop_on_signals():
        shards = open_shards(prefixes)
        with ProgressBar(f"merging into {flags.output}", _bin_bytes(prefixes)) as progress:
            merge_shards(flags.output, shards, overwrite=flags.overwrite, advance=progress.advance)
    print("\n".join([summary_text(flags.output), *next_line(after_prepare(flags.output))]))
    return 0


def _split(flags: argparse.Namespace) -> int:
    with stop_on_signals(), ProgressBar(f"splitting {flags.prefix}", _bin_bytes([flags.prefix])) as progress:
        writers = split(flags.prefix, flags.out, proportions=flags.proportions, documents=flags.documents,
                        seed=flags.seed, overwrite=flags.overwrite, advance=progress.advance)
    _print_written(writers)
    return 0


def _print_written(writers: Sequence[IndexedWriter]) -> None:
    for writer in writers:
        print(f"{writer.prefix}: documents: {writer.num_documents:,}; tokens: {writer.num_tokens:,} of {writer.dtype}")


def _bin_bytes(names: Sequence[str]) -> int:
    paths = [Path(f"{name}.bin") for name in names]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data_parser() -> Parser:
    parser = Parser(description="Describe, hash, verify, merge and split data sets.",
                    epilog="Exit codes: 0 success; 1 a data set does not have its hashes; 2 bad input, also a damaged "
                           ".bin or .idx; 75 merge or split was stopped by a signal.")
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
    command.add_argument("output", metavar="OUT", type=prefix, help="path of the new data set, without .bin")
    command.add_argument("prefixes", metavar="PREFIX", nargs="*", type=prefix,
                         help=f"{help_of_prefix} (default: the shards of OUT)")
    _add_overwrite(command)
    command = commands.add_parser("split", help="divide the documents of a data set among several",
                                  description="Divide the documents of a data set among several.")
    command.set_defaults(function=_split)
    command.add_argument("prefix", metavar="PREFIX", type=prefix, help=help_of_prefix)
    command.add_argument("--out", required=True, metavar="OUT", nargs="+", type=prefix,
                         help="paths of the new data sets, without .bin")
    sizes = command.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--proportions", type=text, metavar="P,P...", help="proportions of the documents: 969,30,1")
    sizes.add_argument("--documents", type=text, metavar="N,N...",
                       help="numbers of documents. One of them may be the word rest: rest,1000")
    command.add_argument("--seed", type=whole_number(0, LARGEST_INT),
                         help="choose the documents at random, with this seed; they keep their order. Without it, the "
                              "parts are consecutive documents, those of the flag --split of a run")
    _add_overwrite(command)
    return parser


def _add_overwrite(command: argparse.ArgumentParser) -> None:
    command.add_argument("--overwrite", action="store_true", help="replace existing files")


def data_main() -> int:
    flags: argparse.Namespace = _data_parser().parse_args()
    try:
        code: int = flags.function(flags)
    except StopRequest as stop:
        say(f"stopped by {stop.name}: give the same command again")
        return STOPPED
    return code


def _documents(args: argparse.Namespace) -> int:
    if args.html:
        check_folder(args.html.absolute().parent, "--html")
    data, meta = IndexedDataset(args.prefix), read_meta(args.prefix) or {}
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    vocab_size, eod_token = (tokenizer.vocab_size, tokenizer.eod_token) if tokenizer else (
        meta.get("vocab_size"), meta.get("eod_token"))
    part = min(1.0, args.max_documents / max(data.num_documents, 1))
    with ProgressBar("inspecting", int(part * data.num_tokens * data.dtype.itemsize)) as progress:
        report = inspect_documents(data, vocab_size=vocab_size, eod_token=eod_token, most=args.max_documents,
                                   advance=progress.advance)
    notes, where = list[str](), str(args.prefix)
    if data.num_tokens:
        facts = source_facts(data)
        notes = [*end_notes(where, facts, eod_token), *learnable_notes(data, where, facts)]
    print("\n".join([*report_lines(report), *(f"note: {note}" for note in notes)]))
    if args.html:
        write_page(args.html, data, report, tokenizer.decode if tokenizer else None)
        print(f"written: {args.html}")
    return 1 if report.counts["damaged"] else 0


def _step(args: argparse.Namespace) -> int:
    run = Path(args.run)
    position = find_step(run, args.step)
    data = open_data_of_step(run, position.start)
    from pretrain.analysis.inspect_step import check_labels, read_step, step_lines  # imports torch

    found = read_step(position, data)
    problems = check_labels(found.batches)
    lines = step_lines(found, problems, samples=args.samples, tokens=args.tokens)
    print("\n".join([*lines, *(f"note: {note}" for note in data.notes)]))
    return 1 if problems else 0


def _inspect_parser() -> Parser:
    parser = Parser(description="Look at data: the documents of a data set, and the tensors of a step of a run. No "
                                "command needs a GPU.",
                    epilog="Exit codes: 0 success; 1 damaged documents, or labels that are not the next tokens; "
                           "2 bad input.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "show the tokens, labels and loss weights that enter the model at a step of a run"
    step = commands.add_parser("step", help=text, description=text)
    step.set_defaults(function=_step)
    step.add_argument("run", metavar="RUN", type=path, help="run folder (--save of the run)")
    step.add_argument("step", metavar="STEP", type=whole_number(1, 2**62), help="number of the step, from 1")
    step.add_argument("--samples", type=whole_number(1, 2**20), default=2,
                      help="samples to show (default: %(default)s)")
    step.add_argument("--tokens", type=whole_number(0, 2**30), default=16,
                      help="positions of each sequence to show (default: %(default)s)")
    text = "find damaged, duplicate and degenerate documents"
    documents = commands.add_parser("documents", help=text, description=text)
    documents.set_defaults(function=_documents)
    documents.add_argument("prefix", metavar="PREFIX", type=prefix, help="path of the data set, without .bin")
    documents.add_argument("--tokenizer", type=path, metavar="PATH", help="tokenizer of the data, to show text")
    documents.add_argument("--html", type=path, metavar="FILE", help="write a page with plots and sampled documents "
                           "(needs matplotlib)")
    documents.add_argument("--max_documents", type=whole_number(1, 2**62), default=1_000_000, metavar="N",
                           help="documents to inspect; of more, evenly spread ones (default: %(default)s)")
    return parser


def inspect_main() -> int:
    args = _inspect_parser().parse_args()
    return int(args.function(args))
