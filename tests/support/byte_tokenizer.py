"""A tokenizer.json whose tokens are single bytes, so that tests can count bytes by hand."""

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.tokenizer import load_tokenizer

EOD = 256


def write_byte_tokenizer(folder: Path, *, with_eod: bool = True) -> Path:
    """Write a tokenizer.json in which each byte is its own token, and 256 ends a document. Returns its path."""
    # a "byte level" piece is the character of a printable byte; the other bytes have the characters from U+0100 on
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    assert set(vocab) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if with_eod:
        tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_byte_corpus(folder: Path) -> None:
    """Write `tokenizer` and a `corpus` of its tokens."""
    write_byte_tokenizer(folder / "tokenizer")
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for number in range(150):
            writer.add_document([*(48 + (number + np.arange(200)) % 64), EOD])
        writer.finalize({"vocab_size": 257, "max_token": EOD, "eod_token": EOD,
                         "tokenizer_sha256": load_tokenizer(folder / "tokenizer").fingerprint})
