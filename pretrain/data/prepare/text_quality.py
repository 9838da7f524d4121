"""Simple statistics of texts, by which people compare sources of pretraining data. Nothing is filtered.

The limits come from the filters of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1.1 and table A1) and of C4
(Raffel et al. 2020, arXiv:1910.10683, section 2.2). Words are what lies between white space. To be fast, a sample of
the documents is measured, which depends on their texts alone.
"""

import operator
import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from pretrain.data.text_inputs.find import Input

DOCUMENT_LIMITS = (
    "under_50_words", "over_100000_words", "mean_word_length_not_3_to_10", "over_0.1_symbols_per_word",
    "under_80%_words_with_letters", "under_2_stop_words", "over_90%_bullet_lines", "over_30%_ellipsis_lines",
    "over_30%_duplicate_lines", "curly_bracket", "lorem_ipsum")
"""what is counted of documents: the last two are C4's, the others Gopher's"""
_SUMS = ("documents", "characters", "letters", "words", "word_characters", "lines", "duplicate_lines",
         "terminal_punctuation_lines")
FIELDS = (*_SUMS, *DOCUMENT_LIMITS)
"""the fields of the counts of a text, in order"""

_IS_LETTER = np.array([chr(code).isalpha() for code in range(128)])
_STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
_BULLETS, _ELLIPSES = ("•", "‣", "◦", "▪", "●", "-", "*"), ("...", "…")
_TERMINAL = (".", "!", "?", '"', "”")
_LARGEST_SAMPLE_BYTES, _SMALLEST_FRACTION = 64 << 20, 1 / 128
_FIRST_BYTES = 3 << 18  # are measured in addition, so that small inputs have more than a few documents
_END = 64  # characters


def sampled_fraction(num_bytes: int, num_sources: int) -> float:
    """Return the fraction of documents to measure of a source: 1/128, a share of 0.75 MiB, and at most 64 MiB."""
    size = max(num_bytes, 1)
    sample = _FIRST_BYTES / num_sources + size * _SMALLEST_FRACTION
    return min(1.0, sample / size, _LARGEST_SAMPLE_BYTES / size)


def sampled_fractions(inputs: Sequence[Input]) -> tuple[float, ...]:
    """Return the fraction of the documents of each input that are measured. It depends on the size of its source."""
    sizes: Counter[str] = Counter()
    for found in inputs:
        sizes[found.source] += found.num_bytes
    return tuple(sampled_fraction(sizes[found.source], len(sizes)) for found in inputs)


def is_sampled(text: str, fraction: float) -> bool:
    """Return whether to measure a document. This depends on its length, its beginning and its end."""
    ends = text[:_END] + text[-_END:]
    return zlib.crc32(ends.encode("utf-8", "surrogatepass"), len(text) & 0xFFFFFFFF) < fraction * 2**32


def measure(text: str) -> list[int]:
    """Return the counts of one document, by FIELDS."""
    lowered, words = text.lower(), text.split()
    lower_words = lowered.split()
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    num_words, num_lines = max(len(words), 1), max(len(lines), 1)
    word_characters = sum(map(len, words))
    duplicates = len(lines) - len(set(lines))
    symbols = text.count("#") + sum(map(text.count, _ELLIPSES))
    return [
        1, len(text), _count_letters(text), len(words), word_characters, len(lines), duplicates,
        sum(line.endswith(_TERMINAL) for line in lines),
        len(words) < 50, len(words) > 100_000, not 3 <= word_characters / num_words <= 10,
        symbols / num_words > 0.1, _count_without_letters(lower_words, text.upper().split()) / num_words > 0.2,
        len(_STOP_WORDS.intersection(lower_words)) < 2,
        sum(line.startswith(_BULLETS) for line in lines) / num_lines > 0.9,
        sum(line.endswith(_ELLIPSES) for line in lines) / num_lines > 0.3,
        duplicates / num_lines > 0.3, "{" in text, "lorem ipsum" in lowered]


def _count_letters(text: str) -> int:
    ascii_text = text.encode("ascii", "ignore")
    letters = int(np.count_nonzero(_IS_LETTER[np.frombuffer(ascii_text, np.uint8)]))
    if len(ascii_text) < len(text):
        letters += sum(character > "\x7f" and character.isalpha() for character in text)
    return letters


def _count_without_letters(lower: Sequence[str], upper: Sequence[str]) -> int:
    """Return the number of words without a letter. They are equal in lower and upper case; so are some scripts."""
    equal = [word for word, is_equal in zip(lower, map(operator.eq, lower, upper), strict=False) if is_equal]
    return sum(word.isascii() or not any(map(str.isalpha, word)) for word in equal)


def quality_summary(counts: Sequence[int]) -> dict[str, float | int | None]:
    """Return the statistics of the documents that were measured, for the summary; fractions are of documents."""
    values = dict(zip(FIELDS, counts, strict=True))

    def ratio(name: str, whole: str) -> float | None:
        return round(values[name] / values[whole], 4) if values[whole] else None

    return {
        "measured_documents": values["documents"],
        "letters_per_character": ratio("letters", "characters"),
        "mean_word_length": ratio("word_characters", "words"),
        "mean_words": ratio("words", "documents"),
        "duplicate_lines": ratio("duplicate_lines", "lines"),
        "terminal_punctuation_lines": ratio("terminal_punctuation_lines", "lines"),
        **{name: ratio(name, "documents") for name in DOCUMENT_LIMITS}}
