#!/usr/bin/env python3
"""Write train.jsonl and valid.jsonl from the source files of Python's standard library."""

from pretrain.cli import Parser, number, path, run_main
from pretrain.data.prepare.python_corpus import python_corpus


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("out", metavar="OUT", type=path, help="folder for train.jsonl and valid.jsonl")
    parser.add_argument("--megabytes", type=number(above=True), default=30,
                        help="largest size of the text in MB (default: %(default)s)")
    args = parser.parse_args()
    corpus = python_corpus(args.out, megabytes=args.megabytes)
    print(f"{corpus.train} and {corpus.valid}: {corpus.num_documents} files, {corpus.num_bytes / 1e6:.1f} MB of text")


if __name__ == "__main__":
    run_main(main)
