"""Prepare the data of a run: a tokenizer, token files."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.active_extensions import document_steps, extend_parser
from pretrain.cli import (
    Parser,
    StopRequest,
    new_prefix,
    next_line,
    number,
    path,
    path_text,
    say,
    stop_on_signals,
    text,
    whole_number,
)
from pretrain.commands.next_command import after_prepare, after_shard, after_tokenizer
from pretrain.data.prepare.input_record import pin_dataset
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import parse_shard
from pretrain.data.prepare.summary import summary_text
from pretrain.data.text_inputs.chunk import FORMATS, ReadSettings, parse_separator
from pretrain.data.text_inputs.formats import STDIN
from pretrain.data.text_inputs.hub_dataset import DatasetName
from pretrain.data.tokenizers.tokenizer import BYTES, find_tokenizer_file, format_of, load_tokenizer
from pretrain.data.tokenizers.train_tokenizer import LEAST_PIECES, train_sentencepiece
from pretrain.errors import STOPPED, ConfigError
from pretrain.remote import path_or_url, without_credentials

_INPUT_HELP = ("text, JSON lines or Parquet, also compressed (.gz, .zst): a file, a folder, a glob in quotes, or - for "
               "standard input. A URL such as s3://bucket/folder, gs://bucket/*.jsonl, https://host/file or "
               "hf://datasets/org/name/*.parquet is one of these in a store; its credentials come from the "
               "environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, ~/.netrc, HF_TOKEN)")
_OPTIONS = ("dataset_config", "dataset_split", "dataset_revision")
_ONLY_OF_FILES = ("format", "document_separator")


def prepare_main() -> int:
    args = _prepare_parser().parse_args()
    inputs = _named_inputs(args)
    separator = parse_separator(args.document_separator) if args.document_separator else ""
    read = ReadSettings(args.format, args.jsonl_key, separator, args.on_error == "skip", can_skip=True)
    steps = document_steps(vars(args))
    settings = PrepareSettings(read, args.append_eod, args.prepend_bos, args.deduplicate, steps)
    shard = parse_shard(args.shard, os.environ) if args.shard else None
    if args.vocab_size is not None:
        if isinstance(inputs, DatasetName):
            # the tokenizer's commit is the one of the tokens
            inputs = pin_dataset(inputs, args.out, shard, overwrite=args.overwrite)
        special = [name for step in steps for name in step.special_tokens]
        _train_missing_tokenizer(inputs, args.tokenizer, read, args.vocab_size, is_shard=shard is not None,
                                 special_tokens=special)
    try:
        with stop_on_signals():
            prepare(inputs, tokenizer=args.tokenizer, out=args.out, settings=settings, workers=args.workers,
                    overwrite=args.overwrite, shard=shard, command=_words_of_all_shards(sys.argv[1:]))
    except StopRequest as stop:
        say(f"stopped by {stop.name}; {stop.remedy}")
        return STOPPED
    written = shard.prefix(args.out) if shard is not None else args.out
    following = after_shard(args.out) if shard is not None else after_prepare(args.out)
    print("\n".join([summary_text(written, steps), *next_line(following)]))
    return 0


def _words_of_all_shards(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that are the same for all shards, without credentials of URLs."""
    kept, is_value = list[str](), False
    for word in words:
        flag = word.partition("=")[0]
        if not is_value and flag not in ("--shard", "--workers", "--overwrite"):
            kept.append(without_credentials(word))
        is_value = word in ("--shard", "--workers")
    return kept


def _prepare_parser() -> Parser:
    parser = Parser(description="Tokenize text, and write OUT.bin and OUT.idx (Megatron's format), OUT.meta.json and "
                                "OUT.summary.json.",
                    epilog="A preparation that was stopped or killed continues if the same command is given again.")
    _add_input_flags(parser)
    parser.add_argument("--tokenizer", type=path_text, required=True,
                        help="SentencePiece .model, tokenizer.json, a folder with one of them, the word bytes, "
                        "or what an extension reads")
    parser.add_argument("--vocab_size", type=whole_number(LEAST_PIECES, 2**24),
                        help="if there is nothing at the path --tokenizer, first train a SentencePiece tokenizer with "
                        "this number of pieces on the inputs")
    parser.add_argument("--out", type=new_prefix, required=True,
                        help="path of the files to write, without the extension")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace existing output, and drop an earlier preparation of other inputs or settings")
    parser.add_argument("--document_separator", type=text,
                        help=r"text between two documents of a text file, such as '\n\n' (default: a file is one "
                        "document)")
    parser.add_argument("--append_eod", action=argparse.BooleanOptionalAction, default=True,
                        help="end each document with the end-of-document token (default: yes)")
    parser.add_argument("--prepend_bos", action="store_true",
                        help="begin each document with the tokenizer's token for the beginning of a text, such as <s>")
    parser.add_argument("--deduplicate", action="store_true",
                        help="leave out documents whose tokens are exactly those of an earlier document")
    parser.add_argument("--workers", type=whole_number(1, 1024), help="worker processes (default: one per CPU core)")
    parser.add_argument("--shard", type=text, metavar="I/N",
                        help="on one of several machines: prepare only part I of N parts, from 0 to N-1, which can be "
                        "merged afterwards. slurm, or slurm/N: the task of an array job of SLURM")
    extend_parser("prepare", parser)
    return parser


def _add_input_flags(parser: Parser) -> None:
    """Add INPUT, and the flags of a dataset and of how inputs are read."""
    parser.add_argument("inputs", metavar="INPUT", nargs="*", type=path_or_url, help=_INPUT_HELP)
    parser.add_argument("--dataset", type=path_text,
                        help="instead of INPUT, read a dataset of the Hugging Face Hub (ORG/NAME), or a folder with "
                        "the files of one; its rows are streamed, and --jsonl_key names the column")
    parser.add_argument("--dataset_config", type=text, help="config of the dataset (default: its default one)")
    parser.add_argument("--dataset_split", type=text, help="split of the dataset (default: train)")
    parser.add_argument("--dataset_revision", type=text,
                        help="branch, tag or commit of the dataset (default: main); the commit is recorded")
    parser.add_argument("--format", choices=FORMATS, default="auto",
                        help="format of the inputs (default: %(default)s, by their content)")
    parser.add_argument("--jsonl_key", type=text, default="text",
                        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop",
                        help="what to do with a document that cannot be read (default: %(default)s)")


def _named_inputs(args: argparse.Namespace) -> list[str] | DatasetName:
    """Return the inputs, or the dataset. Raises ConfigError if there are both or none, and for flags without effect."""
    inputs: list[str] = args.inputs
    if args.dataset is None:
        given = next((name for name in _OPTIONS if getattr(args, name) is not None), None)
        if given is not None:
            raise ConfigError(f"--{given}", problem="it has no effect without --dataset", remedy="leave it out")
        if not inputs:
            raise ConfigError("INPUT", problem="neither an input nor --dataset is given", remedy="name files, or a "
                              "dataset")
        return inputs
    if inputs:
        given = without_credentials(" ".join(inputs))
        raise ConfigError("--dataset", problem=f"inputs are given too: {given}", remedy="leave out one of both")
    for name in _ONLY_OF_FILES:
        if getattr(args, name, None) not in (None, "auto"):
            raise ConfigError(f"--{name}", problem="it has no effect with --dataset", remedy="leave it out")
    return DatasetName(args.dataset, args.dataset_config or "", args.dataset_split or "train",
                       args.dataset_revision or "")


def _words_of(args: argparse.Namespace) -> list[str]:
    """Return the words of the command line that name the inputs."""
    words = [*map(without_credentials, args.inputs)]
    for name in ("dataset", *_OPTIONS):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    return words


def tokenizer_main() -> None:
    parser = Parser(description="Train a SentencePiece tokenizer on text files, and write OUT/tokenizer.model and "
                                "OUT/tokenizer.json.")
    _add_input_flags(parser)
    parser.add_argument("--out", type=path, required=True,
                        help="folder for tokenizer.model, tokenizer.vocab, and the files for transformers")
    parser.add_argument("--vocab_size", type=whole_number(LEAST_PIECES, 2**24), default=8192,
                        help="number of pieces, including 256 for single bytes (default: %(default)s)")
    parser.add_argument("--max_megabytes", type=number(above=True), default=100,
                        help="train on a random sample of this size if the inputs are larger (default: %(default)s)")
    parser.add_argument("--character_coverage", type=number(0, 1, above=True), default=0.9995,
                        help="fraction of the text's characters that get pieces; the others become bytes "
                             "(default: %(default)s)")
    parser.add_argument("--special_tokens", type=text, metavar="NAME,NAME...",
                        help="names of special tokens that no text is encoded as, such as '<|user|>,<|assistant|>'")
    parser.add_argument("--threads", type=whole_number(1, 1024), help="training threads (default: one per CPU core)")
    parser.add_argument("--verbose", action="store_true", help="show SentencePiece's messages")
    args = parser.parse_args()
    reading = ReadSettings(args.format, args.jsonl_key, skip_errors=args.on_error == "skip", can_skip=True)
    _train_tokenizer(_named_inputs(args), args.out, reading, args.vocab_size,
                     max_megabytes=args.max_megabytes, threads=args.threads, verbose=args.verbose,
                     character_coverage=args.character_coverage,
                     special_tokens=args.special_tokens.split(",") if args.special_tokens else ())
    options = [word for flag in ("format", "jsonl_key", "on_error") if getattr(args, flag) != parser.get_default(flag)
               for word in (f"--{flag}", getattr(args, flag))]
    for line in next_line(after_tokenizer(_words_of(args), args.out, options)):
        print(line)


def _train_missing_tokenizer(inputs: list[str] | DatasetName, tokenizer: str, reading: ReadSettings,
                             vocab_size: int, *, is_shard: bool, special_tokens: Sequence[str]) -> None:
    """Train the tokenizer of `prepare --vocab_size`, unless it exists. Raises ConfigError, also if it has another size.

    An existing one without the flag's effect would be a vocabulary that the model was not planned for.
    """
    folder = Path(tokenizer)
    if tokenizer == BYTES or format_of(tokenizer) or folder.is_file() or find_tokenizer_file(folder) is not None:
        existing = load_tokenizer(tokenizer)
        if existing.vocab_size != vocab_size:
            raise ConfigError("--vocab_size", found=vocab_size, expected=f"{existing.vocab_size}, the size of "
                              f"{tokenizer}, which exists",
                              remedy="leave the flag out, or name another --tokenizer to train one")
        return
    if is_shard:
        raise ConfigError("--vocab_size", problem=f"there is no tokenizer at {tokenizer}, and each of the shards would "
                          "train one", remedy="train it first, once, with `ds-pretrain tokenizer`")
    if not isinstance(inputs, DatasetName) and STDIN in inputs:
        raise ConfigError("--vocab_size", problem="standard input can be read only once",
                          remedy="give files, or a tokenizer that exists")
    _train_tokenizer(inputs, folder, reading, vocab_size, special_tokens=special_tokens)


def _train_tokenizer(inputs: list[str] | DatasetName, out: Path, reading: ReadSettings, vocab_size: int,
                     **options: Any) -> None:
    """Train a SentencePiece tokenizer, and report it. Raises ConfigError."""
    started = time.monotonic()
    tokenizer = train_sentencepiece(inputs, out, vocab_size=vocab_size, reading=reading, **options)
    print(f"{tokenizer.path}: {tokenizer.vocab_size} pieces, trained in {time.monotonic() - started:.1f} s", flush=True)
