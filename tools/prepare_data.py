#!/usr/bin/env python3
"""Tokenize text, and write OUT.bin and OUT.idx (Megatron's format), OUT.meta.json and OUT.summary.json.

A preparation that was stopped or killed continues if the same command is given again.
"""

import argparse

from pretrain.cli import Parser, StopRequest, path_text, prefix, run_main, say, stop_on_signals, text, whole_number
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.summary import summary_text
from pretrain.data.text_inputs.chunk import FORMATS, ReadSettings, parse_separator
from pretrain.errors import STOPPED


def main() -> int:
    args = _parser().parse_args()
    separator = parse_separator(args.document_separator) if args.document_separator else ""
    read = ReadSettings(args.format, args.jsonl_key, separator, args.on_error == "skip")
    settings = PrepareSettings(read, args.append_eod, args.prepend_bos, args.deduplicate)
    try:
        with stop_on_signals():
            prepare(args.inputs, tokenizer=args.tokenizer, out=args.out, settings=settings, workers=args.workers,
                    overwrite=args.overwrite)
    except StopRequest as stop:
        say(f"stopped by {stop.name}; {stop.remedy}")
        return STOPPED
    print(summary_text(args.out))
    return 0


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("inputs", metavar="INPUT", nargs="+", type=path_text,
                        help="text, JSON lines or Parquet, also compressed (.gz, .zst): a file, a folder, a glob in "
                        "quotes, or - for standard input")
    parser.add_argument("--tokenizer", type=path_text, required=True,
                        help="SentencePiece .model, tokenizer.json, a folder with one of them, or the word bytes")
    parser.add_argument("--out", type=prefix, required=True, help="path of the files to write, without the extension")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace existing output, and drop an earlier preparation of other inputs or settings")
    parser.add_argument("--format", choices=FORMATS, default="auto",
                        help="format of the inputs (default: %(default)s, by their content)")
    parser.add_argument("--jsonl_key", type=text, default="text",
                        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    parser.add_argument("--document_separator", type=text,
                        help=r"text between two documents of a text file, such as '\n\n' (default: a file is one "
                        "document)")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop",
                        help="what to do with a document that cannot be read (default: %(default)s)")
    parser.add_argument("--append_eod", action=argparse.BooleanOptionalAction, default=True,
                        help="end each document with the end-of-document token (default: yes)")
    parser.add_argument("--prepend_bos", action="store_true",
                        help="begin each document with the tokenizer's token for the beginning of a text, such as <s>")
    parser.add_argument("--deduplicate", action="store_true",
                        help="leave out documents whose tokens are exactly those of an earlier document")
    parser.add_argument("--workers", type=whole_number(1, 1024), help="worker processes (default: one per CPU core)")
    return parser


if __name__ == "__main__":
    run_main(main)
