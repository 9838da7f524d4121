"""The parser of SentencePiece models: damaged and hostile files end in one line, or are read as protobuf reads them."""

import pytest

from pretrain.data.tokenizers.sentencepiece_model import Kind, Piece, parse_model
from tests.support.rejection import rejection


@pytest.mark.parametrize(("content", "message"), [
    (b"\xff" * 50_000_000, "an integer of more than 10 bytes"),
    (b"\x0a\xff\xff\xff\xff\x0f", "it is truncated"),
    (b"\x0a\x7f\x0a", "it is truncated"),
    (b"\x0a", "index out of range"),
    (b"\x0b" * 1_000_000, "wire type 3"),
    (b'{"model": 1}', "wire type 3"),
    (b"\x0a\x02\x18\x63", "99 is not a valid Kind"),
    (b"\x0a\x03\x0a\x01\xff", "can't decode byte 0xff"),
    (b"\x08\x01", "has no len()"),
])  # fmt: skip
def test_hostile_files_are_rejected_in_one_line(content: bytes, message: str) -> None:
    line = rejection(parse_model, content, "x.model")
    assert line.startswith("x.model: it is not a SentencePiece model: ")
    assert message in line
    assert "\n" not in line


def test_values_of_another_type_are_ignored_and_the_last_value_counts() -> None:
    """Piece 0 has an integer as text and score; the normalizer has one as its rules; then "b" replaces "a"."""
    model = parse_model(b"\x0a\x04\x08\x01\x10\x01" b"\x1a\x02\x10\x05" b"\x0a\x06\x0a\x01a\x0a\x01b", "x.model")
    assert model.pieces == [Piece("", 0.0, Kind.NORMAL), Piece("b", 0.0, Kind.NORMAL)]
    assert model.charsmap == b""
