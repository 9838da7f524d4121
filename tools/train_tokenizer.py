#!/usr/bin/env python3
"""Train a SentencePiece tokenizer on text files, and write OUT/tokenizer.model and OUT/tokenizer.json."""

import time

from pretrain.cli import Parser, number, path, path_text, run_main, text, whole_number
from pretrain.data.text_inputs.chunk import FORMATS, ReadSettings
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("inputs", metavar="INPUT", nargs="+", type=path_text,
                        help="text, JSON lines or Parquet, also compressed (.gz, .zst): a file, a folder, a glob in "
                        "quotes, or - for standard input")
    parser.add_argument("--out", type=path, required=True,
                        help="folder for tokenizer.model, tokenizer.vocab, and the files for transformers")
    parser.add_argument("--vocab_size", type=whole_number(300, 2**24), default=8192,
                        help="number of pieces, including 256 for single bytes (default: %(default)s)")
    parser.add_argument("--jsonl_key", type=text, default="text",
                        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    parser.add_argument("--format", choices=FORMATS, default="auto",
                        help="format of the inputs (default: %(default)s, by their content)")
    parser.add_argument("--max_megabytes", type=number(above=True), default=100,
                        help="train on a random sample of this size if the inputs are larger (default: %(default)s)")
    parser.add_argument("--character_coverage", type=number(0, 1, above=True), default=0.9995,
                        help="fraction of the text's characters that get pieces; the others become bytes "
                             "(default: %(default)s)")
    parser.add_argument("--threads", type=whole_number(1, 1024), help="training threads (default: one per CPU core)")
    parser.add_argument("--verbose", action="store_true", help="show SentencePiece's messages")
    args = parser.parse_args()
    started = time.monotonic()
    tokenizer = train_sentencepiece(args.inputs, args.out, vocab_size=args.vocab_size,
                                    reading=ReadSettings(args.format, args.jsonl_key),
                                    max_megabytes=args.max_megabytes, threads=args.threads,
                                    character_coverage=args.character_coverage, verbose=args.verbose)
    print(f"{tokenizer.path}: {tokenizer.vocab_size} pieces, trained in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    run_main(main)
