"""Read the fields of a SentencePiece `.model`, which is a serialized protocol buffer.

The sentencepiece library returns pieces and scores, but neither the settings of the model's normalizer nor which pieces
are user-defined. The field numbers are from sentencepiece's src/sentencepiece_model.proto.

The package's `sentencepiece_model_pb2` needs protobuf, which none of our dependencies requires. That of sentencepiece
0.2.3 rejects protobuf before 7.36.1, and fails to import in a process that has imported transformers' copy.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from pretrain.errors import ConfigError

T = TypeVar("T", int, float, bytes)

UNIGRAM, BPE = 1, 2
_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class Kind(IntEnum):
    """Type of a piece: ModelProto.SentencePiece.Type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """An entry of the vocabulary. Its token id is its position."""

    text: str
    score: float
    kind: Kind


@dataclass(frozen=True)
class SentencePieceModel:
    """Settings of a SentencePiece model that determine how it encodes text."""

    pieces: list[Piece]
    model_type: int
    """UNIGRAM or BPE; 3 is a word model, 4 a character model"""
    byte_fallback: bool
    """encode characters without a piece as UTF-8 bytes"""
    whitespace_as_suffix: bool
    """the dummy space is added at the end of the text instead of the beginning"""
    charsmap: bytes
    """compiled normalization rules; empty: the text is not changed"""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    """spaces are written as U+2581 in pieces"""
    denormalizes: bool
    """decoding changes the text by rules of its own"""

    @property
    def type_name(self) -> str:
        return _MODEL_TYPES.get(self.model_type, str(self.model_type))


def parse_model(content: bytes, where: str) -> SentencePieceModel:
    """Parse the bytes of a .model file. Raises ConfigError that names `where`."""
    try:
        model = _message(content)
        trainer, normalizer, denormalizer = (_message(_last(model, number, b"")) for number in (2, 3, 5))
        pieces = [_piece(_message(entry)) for entry in model[1]]
        return SentencePieceModel(
            pieces, model_type=_last(trainer, 3, UNIGRAM), byte_fallback=bool(_last(trainer, 35, 0)),
            whitespace_as_suffix=bool(_last(trainer, 24, 0)), charsmap=_last(normalizer, 2, b""),
            add_dummy_prefix=bool(_last(normalizer, 3, 1)), remove_extra_whitespaces=bool(_last(normalizer, 4, 1)),
            escape_whitespaces=bool(_last(normalizer, 5, 1)), denormalizes=bool(_last(denormalizer, 2, b"")))
    except (ValueError, IndexError, TypeError, struct.error) as error:
        raise ConfigError(where, problem=f"it is not a SentencePiece model: {error}") from None


def _piece(fields: dict[int, list]) -> Piece:
    text = _last(fields, 1, b"").decode("utf-8")
    return Piece(text, _last(fields, 2, 0.0), Kind(_last(fields, 3, int(Kind.NORMAL))))


def _last(fields: dict[int, list], number: int, default: T) -> T:
    """Return the last value of a field, as protocol buffers define for a repeated occurrence.

    They ignore values of another type, so that SentencePiece reads such a file.
    """
    return next((value for value in reversed(fields[number]) if type(value) is type(default)), default)


def _message(data: bytes) -> dict[int, list]:
    fields: dict[int, list] = defaultdict(list)
    for number, value in _fields(data):
        fields[number].append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Yield (field number, value) of a message: int of a varint, float of 4 bytes, bytes of a string or message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _varint(data, position)
            yield number, value
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
            yield number, struct.unpack_from("<d" if size == 8 else "<f", data, position)[0]
            position += size
        elif wire_type == 2:
            size, position = _varint(data, position)
            if position + size > len(data):
                raise ValueError("it is truncated")
            yield number, data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {wire_type}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the integer that begins at `position`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
        if shift >= 70:
            raise ValueError("an integer of more than 10 bytes")
