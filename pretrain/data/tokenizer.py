"""Tokenizers: SentencePiece `.model` and Hugging Face `tokenizer.json` behind the same two functions.

A model that tools/train_tokenizer.py trained gives any text back exactly. Foreign ones may normalise, as trained.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.data.text import check_unicode
from pretrain.errors import ConfigError

EOD_PIECE = "<|endoftext|>"
_EOD_NAMES = (EOD_PIECE, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<eod>", "[SEP]")
_FILES = ("tokenizer.model", "tokenizer.json")
_SPACE = "\u2581"  # what SentencePiece writes for a space: such a character in the text itself would become one


@dataclass(frozen=True)
class Tokenizer:
    """encode: text to tokens, with no token added and none made from text that looks like a special one.
    decode: tokens to text, special ones left out."""

    path: Path
    """the .model or tokenizer.json file"""
    vocab_size: int
    """largest token + 1"""
    eod_token: int | None
    """marks the end of a document; None where the tokenizer has none"""
    fingerprint: str
    """SHA-256 of the file"""
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """From a SentencePiece .model, a tokenizer.json, or a folder with either. Raises ConfigError."""
    file = _find_file(Path(path))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer {file}", found=str(error.strerror), expected="a readable file") from None
    fingerprint = hashlib.sha256(content).hexdigest()
    if file.suffix == ".json":
        return _load_huggingface(file, content, fingerprint)
    return _load_sentencepiece(file, content, fingerprint)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                return path / name
        raise ConfigError(f"--tokenizer {path}", found="a folder without either", expected=" or ".join(_FILES),
                          remedy="tools/train_tokenizer.py writes the first")
    if not path.exists():
        raise ConfigError(f"--tokenizer {path}", found="no such file", expected="a SentencePiece .model,"
                          " a tokenizer.json, or a folder with either", remedy="tools/train_tokenizer.py writes one")
    return path


def _load_sentencepiece(path: Path, content: bytes, fingerprint: str) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        vocab_size = processor.vocab_size()
    except (RuntimeError, ValueError):
        vocab_size = 0
    if vocab_size == 0:
        raise ConfigError(f"--tokenizer {path}", found=f"{len(content)} bytes that SentencePiece cannot read",
                          expected="a SentencePiece .model or a tokenizer.json",
                          remedy="tools/train_tokenizer.py writes one")
    unknown = processor.unk_id()
    known = [name for name in _EOD_NAMES if processor.piece_to_id(name) != unknown]
    eod = processor.eos_id() if processor.eos_id() >= 0 else processor.piece_to_id(known[0]) if known else None

    def decode(tokens: Sequence[int]) -> str:
        return str(processor.decode([int(token) for token in tokens]))

    return Tokenizer(path, vocab_size, eod, fingerprint, _sentencepiece_encoder(processor), decode)


def _sentencepiece_encoder(processor: Any) -> Callable[[str], list[int]]:
    """encode() for a model. One that treats lines apart, as ours do, gets them so: it is 3 times as fast.

    There U+2581 is spelt in bytes. (Elsewhere a model's own rules stand: cutting its input would change its output.)
    """
    newline = processor.piece_to_id("\n")
    spelt = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]

    def encode_lines(text: str) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(text.split(_SPACE)):
            tokens += spelt if number else []
            lines = processor.encode(part.split("\n"), num_threads=1)
            tokens += [token for line in lines for token in (*line, newline)][:-1]
        return tokens

    probe = "a b\n\n c\n"
    by_lines = encode_lines(probe) == processor.encode(probe) and all(processor.is_byte(token) for token in spelt)

    def encode(text: str) -> list[int]:
        check_unicode(text, "text")
        return encode_lines(text) if by_lines else list(processor.encode(text))

    return encode


def _load_huggingface(path: Path, content: bytes, fingerprint: str) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"--tokenizer {path}", found=str(error), expected="a tokenizer.json of the tokenizers"
                          " library") from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # "<|endoftext|>" in a text is text, not the end of it
    vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(text: str) -> list[int]:
        check_unicode(text, "text")
        return list(library.encode(text, add_special_tokens=False).ids)

    def decode(tokens: Sequence[int]) -> str:
        return str(library.decode([int(token) for token in tokens], skip_special_tokens=True))

    names = _huggingface_eos(path.with_name("tokenizer_config.json")) + _EOD_NAMES
    eod = next((token for token in map(library.token_to_id, names) if token is not None), None)
    return Tokenizer(path, vocab_size, eod, fingerprint, encode, decode)


def _huggingface_eos(path: Path) -> tuple[str, ...]:
    """The "eos_token" of the tokenizer_config.json that often lies beside a tokenizer.json."""
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(str(path), found=str(error), expected="a JSON object") from None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return (eos,) if isinstance(eos, str) else ()
