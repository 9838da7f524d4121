"""Fill-in-the-middle in `ds-pretrain prepare`: its flags."""

from pretrain.cli import LARGEST_INT, Parser, number, text, whole_number
from pretrain.extension import Extension


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--fim_rate", type=number(0, 1), metavar="P",
                        help="fill-in-the-middle: move the middle of each document to its end with this probability, "
                        "behind special tokens, so that a model of code learns to fill a gap (default: never)")
    parser.add_argument("--fim_spm_rate", type=number(0, 1), metavar="P",
                        help="fraction of these documents in the order suffix, prefix, middle; the others are in the "
                        "order prefix, suffix, middle (default: 0.5)")
    parser.add_argument("--fim_seed", type=whole_number(0, LARGEST_INT), metavar="N",
                        help="seed of --fim_rate (default: 0)")
    parser.add_argument("--fim_tokens", type=text, metavar="PREFIX,MIDDLE,SUFFIX",
                        help="names of the tokens in front of the prefix, the middle and the suffix (default: those "
                        "that the tokenizer has of StarCoder's, Qwen2.5-Coder's, Code Llama's, SantaCoder's or "
                        "DeepSeek-Coder's)")


EXTENSION = Extension("fill_in_middle", "Moves the middle of documents to their end, for models of code.",
                      extends={"prepare": _add_flags}, documents="step:steps")
