"""Near-duplicates in `ds-pretrain prepare`: its flags."""

from pretrain.cli import Parser, number
from pretrain.extension import Extension

LOWEST_THRESHOLD = 0.5  # lower ones need bands of two values, which most documents share with others
THRESHOLD = 0.8


def _add_flags(parser: Parser) -> None:
    parser.add_argument("--near_duplicates", choices=("count", "remove"),
                        help="find documents that are similar to an earlier one (MinHash), and count them, or leave "
                        "them out, as well as exact duplicates")
    parser.add_argument("--near_threshold", type=number(LOWEST_THRESHOLD, 1),
                        help="estimated Jaccard similarity of the sets of 5 consecutive words from which on a document "
                        f"is a near-duplicate (default: {THRESHOLD})")


EXTENSION = Extension("near_duplicates", "Counts or leaves out documents that are similar to an earlier one.",
                      extends={"prepare": _add_flags}, documents="step:steps")
