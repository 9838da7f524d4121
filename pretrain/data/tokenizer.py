"""Load tokenizers: SentencePiece `.model` and Hugging Face `tokenizer.json`, with one interface.

A tokenizer that tools/train_tokenizer.py trained decodes any text exactly. Other tokenizers may normalize text.
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
_SPACE = "\u2581"  # SentencePiece's symbol for a space; decoding turns it into a space


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    `encode` maps text to tokens. It adds no special tokens, and encodes their names in the text as plain text. `decode`
    maps tokens to text and drops special tokens.
    """

    path: Path
    """the .model or tokenizer.json file"""
    vocab_size: int
    """largest token + 1"""
    eod_token: int | None
    """token that marks the end of a document; None if the tokenizer has none"""
    fingerprint: str
    """SHA-256 of the file"""
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece .model, a tokenizer.json, or one of them from a folder. Raises ConfigError."""
    file = _find_file(Path(path))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tokenizer {file}", problem=f"it cannot be read: {error.strerror}") from None
    fingerprint = hashlib.sha256(content).hexdigest()
    if file.suffix == ".json":
        return _load_huggingface(file, content, fingerprint)
    return _load_sentencepiece(file, content, fingerprint)


def _find_file(path: Path) -> Path:
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                return path / name
        raise ConfigError(f"--tokenizer {path}", problem=f"the folder contains neither {' nor '.join(_FILES)}",
                          remedy="tools/train_tokenizer.py trains a tokenizer")
    if not path.exists():
        raise ConfigError(f"--tokenizer {path}", problem="there is no such file", remedy="give a SentencePiece .model,"
                          " a tokenizer.json or a folder with one; tools/train_tokenizer.py trains a tokenizer")
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
        raise ConfigError(f"--tokenizer {path}", problem=f"SentencePiece cannot read its {len(content)} bytes",
                          remedy="give a SentencePiece .model or a tokenizer.json; tools/train_tokenizer.py trains one")
    unknown = processor.unk_id()
    known = [name for name in _EOD_NAMES if processor.piece_to_id(name) != unknown]
    eod: int | None = None
    if processor.eos_id() >= 0:
        eod = processor.eos_id()
    elif known:
        eod = processor.piece_to_id(known[0])

    def decode(tokens: Sequence[int]) -> str:
        return str(processor.decode([int(token) for token in tokens]))

    return Tokenizer(path, vocab_size, eod, fingerprint, _sentencepiece_encoder(processor), decode)


def _sentencepiece_encoder(processor: Any) -> Callable[[str], list[int]]:
    """Return the function that encodes text.

    Some models encode each line separately, such as those of tools/train_tokenizer.py. They get single lines, which is
    3 times as fast, and U+2581 is encoded as bytes. Other models get the complete text, because splitting it would
    change their output.
    """
    newline = processor.piece_to_id("\n")
    space_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]

    def encode_lines(text: str) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(text.split(_SPACE)):
            tokens += space_bytes if number else []
            lines = processor.encode(part.split("\n"), num_threads=1)
            tokens += [token for line in lines for token in (*line, newline)][:-1]
        return tokens

    probe = "a b\n\n c\n"
    by_lines = encode_lines(probe) == processor.encode(probe) and all(processor.is_byte(token) for token in space_bytes)

    def encode(text: str) -> list[int]:
        check_unicode(text, "text")
        return encode_lines(text) if by_lines else list(processor.encode(text))

    return encode


def _load_huggingface(path: Path, content: bytes, fingerprint: str) -> Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--tokenizer {path}",
                          problem=f"it is not a tokenizer.json of the tokenizers library: {error}") from None
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # "<|endoftext|>" in a text is encoded as plain text
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
    """Return the "eos_token" of the tokenizer_config.json next to a tokenizer.json, or () if there is none."""
    try:
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(str(path), problem=f"it is not a JSON object: {error}") from None
    eos = eos.get("content") if isinstance(eos, dict) else eos
    return (eos,) if isinstance(eos, str) else ()
