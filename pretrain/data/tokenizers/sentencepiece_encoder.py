"""Encode with a SentencePiece model, word by word where possible, with exactly the tokens of the complete text.

A merge of two parts needs a piece that contains both. Hence no token of a BPE model spans two characters that are
adjacent in no piece, and the parts of the text on both sides are encoded independently. This follows from the pieces of
the model alone, whatever its training settings were. It does not hold for unigram models: these add up scores from the
beginning of the text in float32, and rounding decides between divisions of almost equal score. In 8.3 MB of Python and
prose with a model of 8,000 pieces and nmt_nfkc, words that are encoded alone give other tokens in 23 of 211 texts. The
complete texts of these models are encoded, which sentencepiece 0.2.2 does about as fast as the cache with nmt_nfkc.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizers.sentencepiece_model import BPE, Kind, SentencePieceModel, parse_model
from pretrain.data.tokenizers.special_tokens import EOD_NAMES, TokenIds
from pretrain.data.tokenizers.word_cache import END, SPACE_SYMBOL, EncodeBatch, EncodeWords, Integers, WordCache

_SPACE = "\u2581"  # SentencePiece's symbol for a space
_PLAIN_NORMALIZER = b"\x1a\x06\x12\x00\x18\x00\x20\x00"
"""ModelProto.normalizer_spec with an empty precompiled_charsmap, add_dummy_prefix and remove_extra_whitespaces false.
Appended to a serialized model, it replaces these three fields: parsers merge repeated messages."""

_SEPARATORS = "\x01\x02\x03\x04\x05\x06"
"""control characters, one of which is put between words that are encoded together"""
_FEW_TEXTS = 100  # one call for all texts starts a thread, which takes as long as 100 calls


def words_encoder(processor: Any, content: bytes, *, dtype: npt.DTypeLike,
                  space_symbol: Sequence[int] | None) -> EncodeBatch | None:
    """Return a function that encodes texts; None for a model whose words are not independent of one another.

    The function returns the tokens of all texts one after another, and the position at which each text ends. `content`
    is the model that `processor` has. `space_symbol` are the tokens of a U+2581; None: it is encoded as a space.
    """
    model = parse_model(content, "SentencePiece model")
    separator = next((character for character in _SEPARATORS
                      if not any(character in piece.text for piece in model.pieces)), None)
    if not _is_supported(model) or separator is None:
        return None
    plain = type(processor)()
    try:
        plain.LoadFromSerializedProto(content + _PLAIN_NORMALIZER)
    except RuntimeError:  # texts with which the model checks its normalizer
        return None
    cache = WordCache(_can_cut(model), _encode_words(plain, separator), dtype=dtype, space_symbol=space_symbol or ())
    to_bytes = _normalizer(model, processor, keeps_space_symbol=space_symbol is not None)
    return lambda texts: cache.encode([to_bytes(text) for text in texts])


def _is_supported(model: SentencePieceModel) -> bool:
    """Return whether merges depend on the pieces only.

    An unused piece is divided again by the merges that made it, which may belong to another word. Without bytes,
    unknown characters that follow one another become one token.
    """
    return (model.model_type == BPE and model.byte_fallback and model.escape_whitespaces
            and not any(piece.kind == Kind.UNUSED or math.isnan(piece.score) for piece in model.pieces))


def _can_cut(model: SentencePieceModel) -> npt.NDArray[np.bool_]:
    """Return whether no piece contains the adjacent bytes x and y, as bool [65536] at 256 * x + y."""
    texts = [piece.text.replace(_SPACE, " ").encode() for piece in model.pieces
             if piece.kind in (Kind.NORMAL, Kind.USER_DEFINED)]
    joined = np.frombuffer(END.join(texts), np.uint8)
    can_cut = np.ones((256, 256), np.bool_)
    can_cut[joined[:-1], joined[1:]] = False
    can_cut[:, 0x80:0xC0] = False  # inside a character
    for special in (END, SPACE_SYMBOL):
        can_cut[special[0], :] = can_cut[:, special[0]] = True
    return can_cut.reshape(-1)


def _encode_words(plain: Any, separator: str) -> EncodeWords:
    """Return the function that encodes words with one call. No piece contains the separator, which becomes a byte."""
    (separator_token,) = plain.encode(separator)

    def encode_words(words: Sequence[bytes]) -> tuple[Integers, Integers]:
        tokens = np.array(plain.encode(separator.encode().join(words).decode()), np.int64)
        borders = np.flatnonzero(tokens == separator_token)
        if len(borders) == len(words) - 1:
            return tokens[tokens != separator_token], np.diff(borders, prepend=-1, append=len(tokens)) - 1
        encoded = [plain.encode(word.decode()) for word in words]  # a word contains the separator
        return np.array(list(itertools.chain(*encoded)), np.int64), np.array(list(map(len, encoded)), np.int64)

    return encode_words


def _normalizer(model: SentencePieceModel, processor: Any, *, keeps_space_symbol: bool) -> Callable[[str], bytes]:
    """Return the function that normalizes a text as the model does, and writes it with spaces, in UTF-8."""
    symbol, space = _SPACE.encode(), SPACE_SYMBOL if keeps_space_symbol else b" "
    if model.charsmap or model.remove_extra_whitespaces or model.whitespace_as_suffix:
        return lambda text: space.join(processor.normalize(part).encode().replace(symbol, b" ") for part in
                                       (text.split(_SPACE) if keeps_space_symbol else (text,)))
    prefix = b" " if model.add_dummy_prefix else b""
    return lambda text: (prefix + text.encode()).replace(symbol, space) if text else b""


def sentencepiece_batch(processor: Any, content: bytes, ids: TokenIds) -> EncodeBatch:
    """Return the function that encodes texts. It is made at the first call, because many programs never call it."""
    @functools.cache
    def encoder() -> EncodeBatch:
        space_symbol = _space_bytes(processor) if encodes_by_lines(processor) else None
        by_words = words_encoder(processor, content, dtype=ids.dtype, space_symbol=space_symbol)
        return by_words or _texts_encoder(processor, ids, space_symbol)

    return lambda texts: encoder()(texts)


def _texts_encoder(processor: Any, ids: TokenIds, space_symbol: Sequence[int] | None) -> EncodeBatch:
    """Return the function that encodes complete texts. `space_symbol` are the tokens of a U+2581; None: of a space."""
    symbol = np.array(space_symbol or (), np.int32)

    def encode_texts(texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
        parts = [text.split(_SPACE) if space_symbol else [text] for text in texts]
        arrays = iter(_encode_arrays(processor, list(itertools.chain(*parts))))
        return join_tokens([_joined(list(itertools.islice(arrays, len(part))), symbol) for part in parts], ids)

    return encode_texts


def _encode_arrays(processor: Any, texts: list[str]) -> Sequence[Sequence[int]]:
    """Encode texts to arrays, without lists of Python integers, which take a quarter of the time."""
    try:
        if len(texts) < _FEW_TEXTS:
            return [processor.encode(text, return_type="numpy") for text in texts]
        return list(processor.encode(texts, return_type="numpy", num_threads=1))
    except (TypeError, ValueError):  # before sentencepiece 0.2.2
        return [processor.encode(text) for text in texts]


def _joined(parts: Sequence[Sequence[int]], symbol: Integers) -> Sequence[int]:
    if len(parts) == 1:
        return parts[0]
    return list(np.concatenate([parts[0], *itertools.chain(*((symbol, part) for part in parts[1:]))]))


def sentencepiece_ids(processor: Any) -> TokenIds:
    """Return the special tokens of a model. If it has no end of a text, this token is found by its usual names."""
    bos, eos, pad, unk = (token if token >= 0 else None for token in (
        processor.bos_id(), processor.eos_id(), processor.pad_id(), processor.unk_id()))
    if eos is None:
        eos = next((token for token in map(processor.piece_to_id, EOD_NAMES) if token != unk), None)
    return TokenIds(processor.vocab_size(), bos, eos, pad, unk)


def encodes_by_lines(processor: Any) -> bool:
    """Return whether a SentencePiece model encodes each line separately, such as models of `ds-pretrain tokenizer`.

    For such a model, a U+2581 of the text is encoded as bytes. For other models, it is a space.
    """
    probe, newline = "a b\n\n c\n", processor.piece_to_id("\n")
    joined = [token for line in processor.encode(probe.split("\n")) for token in (*line, newline)][:-1]
    return all(map(processor.is_byte, _space_bytes(processor))) and joined == processor.encode(probe)


def _space_bytes(processor: Any) -> list[int]:
    return [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]


def join_tokens(encoded: Sequence[Sequence[int]], ids: TokenIds) -> tuple[Integers, npt.NDArray[np.int64]]:
    """Return the tokens of all texts one after another, and the position at which each text ends."""
    parts = [np.zeros(0, ids.dtype), *(np.array(tokens, ids.dtype) for tokens in encoded)]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts[1:]], dtype=np.int64)
