"""Measure how fast tiktoken's files encode: python -m tests.extensions.tiktoken.measure_encoding [TEXT ...]

See tests/data/tokenizers/measure_encoding.py.
"""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.extensions.tiktoken.encodings import ENCODINGS
from pretrain.extensions.tiktoken.files import find_encoding, read_tiktoken
from tests.data.tokenizers import measure_encoding

MEASURED = ("cl100k_base", "o200k_base")


def train_files(texts: Sequence[str], folder: Path, vocab_size: int) -> dict[str, Path]:
    """Train a file of ranks with each of the encodings. Return encoding -> path."""
    paths = {}
    for encoding in MEASURED:
        paths[encoding] = folder / f"{vocab_size}.{encoding}.tiktoken"
        paths[encoding].write_bytes(train_ranks(texts, encoding, vocab_size))
    return paths


def train_ranks(texts: Sequence[str], encoding: str, vocab_size: int) -> bytes:
    """Train byte-level BPE with the pattern of an encoding. Return its file of ranks."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(ENCODINGS[encoding].export_pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    tokens = sorted(library.get_vocab(), key=library.get_vocab().__getitem__)
    return b"".join(base64.b64encode(bytes(map(byte_of.__getitem__, token))) + b" %d\n" % rank
                    for rank, token in enumerate(tokens))


def library_loop(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return the function of the library that encodes one text."""
    content = tokenizer.path.read_bytes()
    file = read_tiktoken("--tokenizer", content, find_encoding(tokenizer.path, content))
    encode: Callable[[str], list[int]] = file.library.encode_ordinary
    return encode


def main(words: Sequence[str] | None = None) -> None:
    measure_encoding.main(words, train=train_files, loop_of=library_loop)


if __name__ == "__main__":
    main()
