"""Read files of ranks of the tiktoken library: one line for each token, its bytes in base64 and its number.

The encoding of a file, which is the pattern and the special tokens, is known if the file is a published one. Otherwise
its name is given: `cl100k_base:FILE`, or a file name that ends with `.cl100k_base.tiktoken`.
"""

import base64
import binascii
import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.tokenizers.convert_sentencepiece import json_bytes, to_bytes, tokenizer_config
from pretrain.data.tokenizers.special_tokens import TokenIds
from pretrain.data.tokenizers.tokenizer import Tokenizer, existing_file, read_content
from pretrain.data.tokenizers.word_cache import Integers
from pretrain.errors import ConfigError
from pretrain.extensions.tiktoken.encodings import ENCODINGS, TiktokenEncoding

_FIRST_LINE = re.compile(rb"\s*[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)")


def split_value(value: str) -> tuple[TiktokenEncoding, str] | None:
    """Divide the --tokenizer `cl100k_base`, or `cl100k_base:FILE`, into encoding and file. None for other values."""
    name, colon, file = value.partition(":")
    if name not in ENCODINGS or os.path.exists(value) or bool(colon) != bool(file):
        return None
    return (ENCODINGS[name], file) if file or ENCODINGS[name].url else None


class TiktokenFormat:
    """The format, for `load_tokenizer`."""

    suffix = ".tiktoken"

    def named_file(self, value: str) -> str | None:
        """Return FILE of `cl100k_base:FILE`; "" for `cl100k_base`."""
        divided = split_value(value)
        return None if divided is None else divided[1]

    def load(self, value: str) -> Tokenizer:
        """Load the file in the value with its encoding, or the published file of the encoding."""
        encoding, file = split_value(value) or (None, "")
        assert encoding is not None
        if not file:
            return replace(_tokenizer(Path(value), download_ranks(encoding), encoding), value=value)
        path = existing_file(Path(file))
        content = read_content(path)
        if not self.recognizes(content):
            raise ConfigError(f"--tokenizer {value}", problem="the file is not a tiktoken file, whose lines are the "
                              "base64 of a token and its number",
                              remedy=f"leave out {encoding.name}: before another tokenizer's file")
        return replace(_tokenizer(path, content, encoding), value=f"{encoding.name}:{path}")

    def recognizes(self, content: bytes) -> bool:
        """Return whether a file begins with a token in base64 and its number: Llama 3's is called tokenizer.model."""
        return _FIRST_LINE.match(content) is not None

    def read(self, file: Path, content: bytes) -> Tokenizer:
        """Load a file whose encoding is known by its hash or by its name."""
        return _tokenizer(file, content, find_encoding(file, content))


def _tokenizer(path: Path, content: bytes, encoding: TiktokenEncoding) -> Tokenizer:
    ranks = read_tiktoken(f"--tokenizer {path}", content, encoding)
    return Tokenizer(path, ranks.ids, fingerprint(content, encoding), ranks.encode_texts, ranks.decode,
                     ranks.special_tokens.get, exported_files=ranks.files_for_transformers,
                     name_of_copy=f"tokenizer.{encoding.name}{TiktokenFormat.suffix}",
                     begins_with_bos=ranks.ids.bos is not None)  # Llama 3's


def find_encoding(path: Path, content: bytes) -> TiktokenEncoding:
    """Return the encoding of a file of ranks: of a published file, or the one in its name. Raises ConfigError."""
    digest = hashlib.sha256(content).hexdigest()
    published = next((encoding for encoding in ENCODINGS.values() if encoding.sha256 == digest), None)
    suffix = TiktokenFormat.suffix
    named = ENCODINGS.get(path.name.removesuffix(suffix).rpartition(".")[2]) if path.suffix == suffix else None
    is_own = named is not None and path.name != f"{named.name}{suffix}"
    if found := published or (named if is_own or (named and not named.sha256) else None):
        return found
    example = named.name if named else "cl100k_base"
    raise ConfigError(f"--tokenizer {path}", problem="it is a tiktoken file, and " + (
        f"not the published file of {named.name}" if named else "none of the published ones") + ". Such files do not "
        "say how they divide a text into words", remedy=f"write the name of the encoding before it, for example "
        f"--tokenizer {example}:{path}; the encodings are {', '.join(ENCODINGS)}")


def download_ranks(encoding: TiktokenEncoding) -> bytes:
    """Return the published file of ranks, from tiktoken's cache or its server. Raises ConfigError."""
    where = f"--tokenizer {encoding.name}"
    _library(where)
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(encoding.url, encoding.sha256)
    except Exception as error:  # of requests, and OSError
        raise ConfigError(where, problem=f"tiktoken cannot download {encoding.url} ({type(error).__name__})",
                          remedy=f"download it on another machine, and give --tokenizer {encoding.name}:FILE; or copy "
                          "tiktoken's cache, and set TIKTOKEN_CACHE_DIR") from None


def _library(where: str) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(where, problem="tiktoken files need the package tiktoken",
                          remedy="pip install 'ds-pretrain[tiktoken]'") from None
    return tiktoken


@dataclass(frozen=True)
class TiktokenFile:
    """A file of ranks with its encoding."""

    encoding: TiktokenEncoding
    texts: dict[int, bytes]
    """bytes of each token that is not special"""
    special_tokens: dict[str, int]
    library: Any
    """tiktoken.Encoding"""

    @property
    def ids(self) -> TokenIds:
        """Size of the vocabulary, and special tokens."""
        bos, eod = self.encoding.bos, self.encoding.eod
        return TokenIds(int(self.library.n_vocab), self.special_tokens[bos] if bos else None, self.special_tokens[eod])

    def encode_texts(self, texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
        """Return the tokens of all texts one after another, and the position at which each text ends.

        `Encoding.encode_to_numpy` would be about 10% faster, but in tiktoken 0.9 it encodes the name of a special token
        as this token. `encode_ordinary_batch` with one thread is slower.
        """
        if self.encoding.nfc:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        parts = [np.array(self.library.encode_ordinary(text), self.ids.dtype) for text in texts]
        return np.concatenate([np.zeros(0, self.ids.dtype), *parts]), np.cumsum(list(map(len, parts)), dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.texts.get(int(token), b"") for token in tokens).decode("utf-8", "replace")

    def files_for_transformers(self, max_length: int | None) -> dict[str, bytes]:
        """Return tokenizer.json and tokenizer_config.json, by name."""
        library = convert_tiktoken(self)
        return {"tokenizer.json": to_bytes(library),
                "tokenizer_config.json": json_bytes(tokenizer_config(library, self.ids, max_length=max_length))}


def read_tiktoken(where: str, content: bytes, encoding: TiktokenEncoding) -> TiktokenFile:
    """Parse a file of ranks. Raises ConfigError that names `where`."""
    tiktoken = _library(where)
    ranks = _parse(where, content)
    special_tokens = encoding.special_tokens(len(ranks), max(ranks.values()) + 1)
    if used := set(special_tokens.values()) & set(ranks.values()):
        raise ConfigError(where, problem=f"it has the token {min(used)}, which is a special token of {encoding.name}",
                          remedy="name the encoding that belongs to the file")
    try:
        library = tiktoken.Encoding(encoding.name, pat_str=encoding.pattern, mergeable_ranks=ranks,
                                    special_tokens=special_tokens)
    except Exception as error:  # the library raises any class
        raise ConfigError(where, problem=f"tiktoken cannot use it: {error}") from None
    return TiktokenFile(encoding, {rank: text for text, rank in ranks.items()}, special_tokens, library)


def _parse(where: str, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            text, rank = line.split() if line.strip() else (b"", b"")
            if rank and ranks.setdefault(base64.b64decode(text, validate=True), int(rank)) != int(rank):
                raise ValueError
        except (ValueError, binascii.Error):
            raise ConfigError(where, problem=f"line {number} of the tiktoken file is not the base64 of a new token and "
                              "its number") from None
    values = set(ranks.values())
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(values) < len(ranks) or min(values) < 0 or max(values) >= 2**31 - 2**16 or b"" in ranks:
        what = f"it has no token for the byte {missing[0]}" if missing else "two tokens have the same number"
        raise ConfigError(where, problem=f"the tiktoken file is damaged: {what}", remedy="download it again")
    return ranks


def fingerprint(content: bytes, encoding: TiktokenEncoding) -> str:
    """Return the SHA-256 of the file, or, for a file other than the published one, of it and the encoding's name."""
    digest = hashlib.sha256(content)
    if digest.hexdigest() != encoding.sha256:
        digest.update(f"\n{encoding.name}".encode())
    return digest.hexdigest()


def convert_tiktoken(file: TiktokenFile) -> Any:
    """Return a tokenizers.Tokenizer: byte-level BPE that first looks up a complete word, as tiktoken does."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    names = sorted(file.special_tokens, key=file.special_tokens.__getitem__)

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:
            return {text: token for token, text in file.texts.items()}

        def tokenizer(self) -> Any:
            vocab, merges = self.extract_vocab_merges_from_model("")
            # The library numbers added tokens itself, unless the vocabulary has them, and warns of unused numbers.
            vocab |= file.special_tokens
            unused = set(range(file.ids.vocab_size)) - set(vocab.values())
            vocab |= {f"<|unused_{token}|>": token for token in unused}
            return Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))

    library = Converter(pattern=file.encoding.export_pattern, extra_special_tokens=names).converted()
    if file.encoding.nfc:
        library.normalizer = normalizers.NFC()
    library.encode_special_tokens = True
    return library
