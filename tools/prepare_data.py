#!/usr/bin/env python3
"""Tokenize text files, and write OUT.bin and OUT.idx (Megatron's format) and OUT.meta.json."""

import argparse

from pretrain.cli import Parser, path_text, prefix, run_main, text, whole_number
from pretrain.data.prepare.prepare import prepare


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("inputs", metavar="INPUT", nargs="+", type=path_text,
                        help="text file (one document) or .jsonl file (one document per line); either may end with .gz")
    parser.add_argument("--tokenizer", type=path_text, required=True,
                        help="SentencePiece .model, tokenizer.json, or a folder with one of them")
    parser.add_argument("--out", type=prefix, required=True, help="path of the files to write, without the extension")
    parser.add_argument("--jsonl_key", type=text, default="text",
                        help="key of the text in a .jsonl line (default: %(default)s)")
    parser.add_argument("--workers", type=whole_number(1, 1024), help="worker processes (default: one per CPU core)")
    parser.add_argument("--append_eod", action=argparse.BooleanOptionalAction, default=True,
                        help="end each document with the end-of-document token (default: yes)")
    args = parser.parse_args()
    done = prepare(args.inputs, tokenizer=args.tokenizer, out=args.out, jsonl_key=args.jsonl_key,
                   workers=args.workers, append_eod=args.append_eod)
    print(f"{args.out}.bin: {done.num_tokens:,} tokens of {done.num_documents:,} documents,"
          f" unigram entropy {done.entropy_nats:.4f} nats a token")


if __name__ == "__main__":
    run_main(main)
