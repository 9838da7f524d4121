"""The byte tokenizer (--tokenizer bytes): tokens 0 to 255 are the bytes of UTF-8. It has no file."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizers.special_tokens import EOD_PIECE, TokenIds
from pretrain.data.tokenizers.word_cache import Integers

BYTES = "bytes"
"""the value of --tokenizer"""
BYTE_IDS = TokenIds(vocab_size=258, bos=257, eos=256)
BYTE_FINGERPRINT = hashlib.sha256(b"bytes of UTF-8; 256 ends a document, 257 begins one").hexdigest()
_BOS_PIECE = "<|startoftext|>"


def encode_bytes(text: str) -> list[int]:
    """Return the bytes of a text."""
    return list(text.encode())


def encode_bytes_batch(texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
    """Return the bytes of all texts one after another, and the position at which each text ends."""
    encoded = [text.encode() for text in texts]
    tokens = np.frombuffer(b"".join(encoded), np.uint8).astype(BYTE_IDS.dtype)
    return tokens, np.cumsum([len(data) for data in encoded], dtype=np.int64)


def decode_bytes(tokens: Sequence[int]) -> str:
    """Return the text of tokens without special tokens. Bytes that are not UTF-8 become U+FFFD."""
    return bytes(int(token) for token in tokens if token < 256).decode("utf-8", "replace")


def byte_library() -> Any:
    """Return the tokenizers.Tokenizer with the same tokens, for transformers: a byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # in byte-level BPE, a printable byte is the character with its number, and other bytes follow from U+0100 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    library = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True) for name in (EOD_PIECE, _BOS_PIECE)])
    library.encode_special_tokens = True
    return library
