"""Documents whose middle is moved to their end: which ones, where they are divided, and their tokens.

The method is that of Bavarian et al. 2022 (arXiv 2207.14255), on documents: three parts at two random characters.
PSM is <prefix> prefix <suffix> suffix <middle> middle. SPM is the joint variant of appendix D of that paper, which Code
Llama (arXiv 2308.12950) and StarCoder train with, too: <prefix> <suffix> suffix <middle> prefix middle. As in Code
Llama, prefix and middle are encoded as one text in SPM, and no space is added in front of the inner parts.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import Encode
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError

KNOWN_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),  # StarCoder
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),  # Qwen2.5-Coder, CodeGemma
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>"),  # Code Llama
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),  # SantaCoder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),  # DeepSeek-Coder
    ("<PRE>", "<MID>", "<SUF>"))
"""names of the tokens before the prefix, the middle and the suffix, as the tokenizers of code models have them"""
_ANCHOR = "\u263a"
"""put in front of a part in the middle of a text, so that the tokenizer adds no space at the part's beginning"""
_PROBE = "def f(x):\n    return x"


@dataclass(frozen=True)
class FillInMiddle:
    """Settings that determine which documents are rearranged, and how."""

    rate: float
    """probability that a document is rearranged"""
    spm_rate: float
    """probability that a rearranged document is in the format SPM, otherwise PSM"""
    seed: int
    names: tuple[str, str, str] | None = None
    """names of the tokens before the prefix, the middle and the suffix; None: the first KNOWN_NAMES that exist"""


class Parts(NamedTuple):
    """A document in three parts."""

    is_spm: bool
    prefix: str
    middle: str
    suffix: str


def divide_document(text: str, settings: FillInMiddle) -> Parts | None:
    """Return the parts of a document that is rearranged; None for other documents.

    This depends on the seed and the text alone: not on other documents, workers or the order of the inputs.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32,
                             key=settings.seed.to_bytes(8, "little"))
    numbers = np.frombuffer(digest.digest(), "<u8").tolist()
    if not text or numbers[0] >= settings.rate * 2**64:
        return None
    start, stop = sorted(number % (len(text) + 1) for number in numbers[2:])
    return Parts(numbers[1] < settings.spm_rate * 2**64, text[:start], text[start:stop], text[stop:])


def find_tokens(tokenizer: Tokenizer, names: tuple[str, str, str] | None) -> tuple[tuple[str, str, str],
                                                                                  tuple[int, int, int]]:
    """Return names and ids of the tokens before prefix, middle and suffix. Raises ConfigError if they are missing."""
    for candidate in [names] if names else KNOWN_NAMES:
        prefix, middle, suffix = map(tokenizer.token_of, candidate)
        if prefix is not None and middle is not None and suffix is not None and len({prefix, middle, suffix}) == 3:
            return candidate, (prefix, middle, suffix)
    if names:
        missing = next((name for name in names if tokenizer.token_of(name) is None), "")
        raise ConfigError("--fim_tokens", problem=f"the tokenizer {tokenizer.path} has no token {missing!r}" if missing
                          else "two of the names are the same token")
    raise ConfigError(f"--tokenizer {tokenizer.path}", problem="it has no tokens such as "
                      f"{', '.join(KNOWN_NAMES[0])}, which --fim_rate needs",
                      remedy="name others by --fim_tokens PREFIX,MIDDLE,SUFFIX, or train a tokenizer with `ds-pretrain "
                             f"tokenizer --special_tokens '{','.join(KNOWN_NAMES[0])}'`")


@dataclass(frozen=True)
class Arrangement:
    """Settings, and what rearranging needs to know of the tokenizer."""

    settings: FillInMiddle
    names: tuple[str, str, str]
    prefix: int
    middle: int
    suffix: int
    anchor: tuple[int, ...] = ()
    """tokens of _ANCHOR, if the tokenizer adds a space at the beginning of a text"""
    divided_names: tuple[str, ...] = ()
    """names that the tokenizer, such as Qwen2.5's, encodes in a text as the tokens: they are encoded in two parts"""

    def facts(self) -> dict[str, Any]:
        """Return settings and tokens, for .meta.json and .summary.json."""
        return {"rate": self.settings.rate, "spm_rate": self.settings.spm_rate, "seed": self.settings.seed,
                "tokens": {"prefix": self.prefix, "middle": self.middle, "suffix": self.suffix},
                "names": list(self.names)}


def make_arrangement(tokenizer: Tokenizer, settings: FillInMiddle) -> Arrangement:
    """Return the arrangement with this tokenizer. Raises ConfigError if it cannot be used.

    This encodes short texts. Do not encode long ones with the same object, whose cache assumes that they are alike.
    """
    names, (prefix, middle, suffix) = find_tokens(tokenizer, settings.names)
    special = {prefix, middle, suffix}
    divided = tuple(name for name in names if len(name) > 1 and special & set(tokenizer.encode(name)))
    anchor = tuple(tokenizer.encode(_ANCHOR))
    if tokenizer.encode(_ANCHOR + _PROBE) == [*anchor, *tokenizer.encode(_PROBE)]:
        anchor = ()
    arrangement = Arrangement(settings, names, prefix, middle, suffix, anchor, divided)
    encoder = FillInMiddleEncoder(tokenizer, arrangement, lambda texts, is_document: tokenizer.encode_batch(texts))
    expected = tokenizer.decode(tokenizer.encode(_PROBE))
    for cut in range(1, len(_PROBE)):
        pieces = [_Piece((), _PROBE[:cut], is_inside=False), _Piece((), _PROBE[cut:], is_inside=True)]
        if tokenizer.decode(encoder.join(pieces, [2])[0].tolist()) != expected:
            raise _problem(tokenizer, "the tokens of a text in parts do not add up to the text, for example because "
                           "spaces at the ends are removed")
    for name in names:
        if special & set(encoder.encode([name], [False])[0].tolist()):
            raise _problem(tokenizer, f"it encodes the text {name!r} as the special token")
    return arrangement


def _problem(tokenizer: Tokenizer, problem: str) -> ConfigError:
    return ConfigError(f"--tokenizer {tokenizer.path}", problem=problem,
                       remedy="choose another tokenizer, or leave out --fim_rate")


class _Piece(NamedTuple):
    """A text that is encoded by itself."""

    before: tuple[int, ...]
    """special tokens before it"""
    text: str
    is_inside: bool
    """whether other text of the document precedes it"""


class FillInMiddleEncoder:
    """Encodes documents, some of them rearranged."""

    def __init__(self, tokenizer: Tokenizer, arrangement: Arrangement, encode: Encode) -> None:
        """encode: encodes parts of texts."""
        self._tokenizer, self._arrangement, self._encode_parts = tokenizer, arrangement, encode
        self._anchor = list(arrangement.anchor)
        self._inside_name = re.compile("|".join(f"(?<={re.escape(name[0])})(?={re.escape(name[1:])})"
                                                for name in arrangement.divided_names))

    def encode(self, texts: Sequence[str], is_document: Sequence[bool]) -> tuple[npt.NDArray[Any],
                                                                                npt.NDArray[np.int64]]:
        """Return the tokens of all texts one after another, and the position at which each text ends.

        Only a text that is a complete document is rearranged. Raises ConfigError.
        """
        pieces, counts = list[_Piece](), list[int]()
        for text, is_complete in zip(texts, is_document, strict=True):
            parts = divide_document(text, self._arrangement.settings) if is_complete else None
            new = [_Piece((), text, is_inside=False)] if parts is None else self._arrange(parts)
            if self._arrangement.divided_names:
                new = [divided for piece in new for divided in self._divide(piece)]
            pieces += new
            counts.append(len(new))
        return self.join(pieces, counts)

    def _arrange(self, parts: Parts) -> list[_Piece]:
        """Return the parts in the order of the tokens."""
        prefix, middle, suffix = self._arrangement.prefix, self._arrangement.middle, self._arrangement.suffix
        if parts.is_spm:
            return [_Piece((prefix, suffix), parts.suffix, is_inside=True),
                    _Piece((middle,), parts.prefix + parts.middle, is_inside=False)]
        return [_Piece((prefix,), parts.prefix, is_inside=False), _Piece((suffix,), parts.suffix, is_inside=True),
                _Piece((middle,), parts.middle, is_inside=True)]

    def _divide(self, piece: _Piece) -> list[_Piece]:
        """Divide a piece inside each name of a special token, so that the name is encoded as plain text."""
        first, *others = self._inside_name.split(piece.text)
        return [piece._replace(text=first), *(_Piece((), text, is_inside=True) for text in others)]

    def join(self, pieces: Sequence[_Piece], counts: Sequence[int]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Encode the pieces, and join their tokens. counts: the number of pieces of each text."""
        anchored = [bool(self._anchor) and piece.is_inside for piece in pieces]
        texts = [(_ANCHOR if anchor else "") + piece.text for piece, anchor in zip(pieces, anchored, strict=True)]
        tokens, ends = self._encode_parts(texts, [False] * len(texts))
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) + len(self._anchor) * np.array(anchored, np.int64)
        parts, lengths = list[npt.NDArray[Any]](), np.zeros(len(pieces), np.int64)
        for number, (piece, start, stop) in enumerate(zip(pieces, starts.tolist(), ends.tolist(), strict=True)):
            if anchored[number] and tokens[start - len(self._anchor) : start].tolist() != self._anchor:
                raise _problem(self._tokenizer, f"it joins {_ANCHOR!r} with the text after it")
            parts += [np.array(piece.before, tokens.dtype), tokens[start:stop]]
            lengths[number] = len(piece.before) + stop - start
        last_pieces = np.cumsum(np.array(counts, np.int64)) - 1
        return np.concatenate([tokens[:0], *parts]), np.cumsum(lengths)[last_pieces]
