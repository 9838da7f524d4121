"""Load tokenizers: SentencePiece `.model`, Hugging Face `tokenizer.json`, GPT-2's `vocab.json`, bytes.

Extensions bring other formats (TokenizerFormat). All have one interface. A tokenizer that `ds-pretrain tokenizer`
trained decodes any text exactly. Other tokenizers may normalize text.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pretrain.active_extensions import functions
from pretrain.data.text_inputs.text import check_unicode
from pretrain.data.tokenizers.huggingface_tokenizer import read_library
from pretrain.data.tokenizers.sentencepiece_encoder import join_tokens, sentencepiece_batch, sentencepiece_ids
from pretrain.data.tokenizers.special_tokens import TokenIds, find_special_tokens, read_object
from pretrain.data.tokenizers.word_cache import EncodeBatch, Integers
from pretrain.errors import ConfigError, file_errors
from pretrain.hub import find_repository, snapshot_in, tokenizer_repository
from pretrain.stored_json import open_regular

BYTES = "bytes"
"""the value of --tokenizer for the byte tokenizer: tokens 0 to 255 are the bytes of UTF-8. It has no file."""
BYTE_IDS = TokenIds(vocab_size=258, bos=257, eos=256)
BYTE_FINGERPRINT = hashlib.sha256(b"bytes of UTF-8; 256 ends a document, 257 begins one").hexdigest()
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
                   "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
"""names of the files that belong to a tokenizer"""
HASHES_KEY = "files_sha256"
"""key of tokenizer_config.json: hashes of a tokenizer.model, and of the tokenizer.json that was made from it"""
_REMEDY = ("give a SentencePiece .model, a tokenizer.json or a folder with one, a repository (org/name), the name of a "
           "preset of --model, the word bytes, or what an extension reads; `ds-pretrain tokenizer` trains a tokenizer")


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer.

    Encoding adds no special tokens, and encodes their names in the text as plain text. `decode` maps tokens to text and
    drops special tokens.
    """

    path: Path
    """the .model, tokenizer.json or vocab.json, or the file of an extension's format; a name of such a format without a
    file; the word "bytes" for the byte tokenizer"""
    ids: TokenIds
    """size of the vocabulary, special tokens"""
    fingerprint: str
    """SHA-256 of the file, or of vocab.json and merges.txt; a constant for the byte tokenizer; an extension's format
    chooses its own, which is equal for equal tokens only"""
    encode_texts: EncodeBatch
    """`encode_batch` for texts without lone surrogates"""
    decode: Callable[[Sequence[int]], str]
    token_of: Callable[[str], int | None] = lambda name: None
    """returns the token with this name, special or not; None if there is none"""
    exported_files: Callable[[int | None], dict[str, bytes]] | None = None
    """of an extension's format: returns tokenizer.json and tokenizer_config.json, by the longest text in tokens"""
    name_of_copy: str = ""
    """name of a copy of the file, by which its format is found; "": the usual one"""
    begins_with_bos: bool = False
    """whether transformers adds `ids.bos` before a text, if no file says it"""
    value: str = ""
    """value of --tokenizer; "": `path`"""

    @property
    def name(self) -> str:
        """Value of --tokenizer that loads this tokenizer, also in another working directory."""
        return absolute_tokenizer(self.value or str(self.path))

    @property
    def has_file(self) -> bool:
        """False for the byte tokenizer, and for one that was given by a name alone."""
        return not self.is_bytes and self.value != str(self.path)

    @property
    def is_bytes(self) -> bool:
        """True for the byte tokenizer, which has no file."""
        return str(self.path) == BYTES

    @property
    def vocab_size(self) -> int:
        """Largest token + 1."""
        return self.ids.vocab_size

    @property
    def eod_token(self) -> int | None:
        """Token that marks the end of a document; None if the tokenizer has none."""
        return self.ids.eos

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ConfigError for a lone surrogate."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
        """Return the tokens of all texts one after another, as `ids.dtype`, and the position at which each text ends.

        This is fastest for 64 KiB of text or more. Raises ConfigError for a lone surrogate.
        """
        for text in texts:
            check_unicode(text, "text")
        return self.encode_texts(texts)


class TokenizerFormat(Protocol):
    """A format of tokenizers that an extension brings: see Extension.tokenizers."""

    suffix: str
    """of its files, by which they are found in a folder; "": they are not"""

    def named_file(self, value: str) -> str | None:
        """Return the file in a value of --tokenizer that is of this format, such as NAME:FILE. The value ends with it.

        "": the value is a name, and needs no file. None: the value is not of this format.
        """

    def load(self, value: str) -> Tokenizer:
        """Load the tokenizer of such a value. Raises ConfigError."""

    def recognizes(self, content: bytes) -> bool:
        """Return whether a file, whatever its name, is of this format."""

    def read(self, file: Path, content: bytes) -> Tokenizer:
        """Load the tokenizer of a file. Raises ConfigError."""


def _formats() -> "Iterator[TokenizerFormat]":
    for _, make in functions("tokenizers"):
        yield make()


def format_of(value: str) -> tuple[TokenizerFormat, str] | None:
    """Return the extension's format that a value of --tokenizer names, and its file or ""; None: it names none."""
    return next(((each, file) for each in _formats() if (file := each.named_file(value)) is not None), None)


def absolute_tokenizer(value: str) -> str:
    """Return a value of --tokenizer that does not depend on the working directory."""
    if named := format_of(value):
        file = named[1]
        return value.removesuffix(file) + (str(Path(file).absolute()) if file else "")
    return value if value == BYTES or tokenizer_repository(value) else str(Path(value).absolute())


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece .model, a tokenizer.json, a vocab.json, or one of them from a folder. Raises ConfigError.

    "bytes" is the byte tokenizer. A repository of the Hub is downloaded if the local cache does not have it. Extensions
    read other values and files.

    A folder with a tokenizer.model and a tokenizer.json is read as transformers reads it, from tokenizer.json. If
    ds-pretrain tokenizer or an export made tokenizer.json from tokenizer.model, both encode alike. Then
    tokenizer.model is read, which encodes twice as fast, and the fingerprint is the trained tokenizer's.
    """
    if str(path) == BYTES:
        if Path(BYTES).exists():
            raise ConfigError(f"--tokenizer {BYTES}", problem="this word means the byte tokenizer, and there is a file "
                              "or folder with this name too", remedy="rename it, or give its absolute path")
        return Tokenizer(Path(BYTES), BYTE_IDS, BYTE_FINGERPRINT, encode_bytes, decode_bytes)
    if named := format_of(str(path)):
        return named[0].load(str(path))
    repository = tokenizer_repository(str(path))
    file = existing_file(find_repository(repository, flag="--tokenizer", want="tokenizer") if repository else
                      snapshot_in(Path(path)))
    content = read_content(file)
    if file.suffix == ".json":
        return _load_huggingface(file, content)
    for each in _formats():
        if file.suffix == each.suffix or each.recognizes(content):
            return each.read(file, content)
    return _load_sentencepiece(file, content)


def file_of_tokenizer(value: str) -> str | None:
    """Return the file or folder that a value of --tokenizer names; None if it names none."""
    if named := format_of(value):
        return named[1] or None
    return None if value == BYTES or tokenizer_repository(value) else value


def read_content(file: Path) -> bytes:
    """Return the bytes of a tokenizer's file. Raises ConfigError."""
    with file_errors(f"--tokenizer {file}"), open_regular(file) as opened:
        return opened.read()


def check_links(folder: Path) -> None:
    """Raise ConfigError for a file of a tokenizer that is a link out of its folder.

    Files of a stranger's folder are copied: such a link would copy any file of this machine. In the Hub's cache, the
    files of a snapshot are links to the blobs of the same repository.
    """
    root = folder.resolve()
    blobs = [each.parent / "blobs" for each in root.parents
             if each.name == "snapshots" and each.parent.name.startswith("models--")]
    suffixes = {each.suffix for each in _formats() if each.suffix}
    for path in sorted(folder.iterdir()):
        is_copied = path.name in TOKENIZER_FILES or path.suffix in suffixes
        if is_copied and not any(path.resolve().is_relative_to(each) for each in (root, *blobs)):
            raise ConfigError(str(path), problem=f"this is a link to {path.resolve()}, outside of its folder, which is "
                              "not followed", remedy="replace the link by the file, if you trust it")


def existing_file(path: Path) -> Path:
    """Return a file, or the file of a folder that `load_tokenizer` reads. Raises ConfigError."""
    if not path.is_dir():
        if not path.exists():
            raise ConfigError(f"--tokenizer {path}", problem="there is no such file", remedy=_REMEDY)
        return path
    found = find_tokenizer_file(path)
    if found is None:
        raise ConfigError(f"--tokenizer {path}", problem="the folder contains neither tokenizer.model nor "
                          f"tokenizer.json{_other_files(path)}", remedy="name a file or folder that has one; "
                          "`ds-pretrain tokenizer` trains a tokenizer")
    return found


def find_tokenizer_file(folder: Path) -> Path | None:
    """Return the file of a folder that `load_tokenizer` reads; None if the folder has no such file."""
    model, fast, vocab = folder / "tokenizer.model", folder / "tokenizer.json", folder / "vocab.json"
    if fast.is_file():
        return model if model.is_file() and _is_made_from(fast, model) else fast
    if model.is_file():
        return model
    if vocab.is_file() and (folder / "merges.txt").is_file():
        return vocab
    others = sorted(path for each in _formats() if each.suffix for path in folder.glob(f"*{each.suffix}")
                    if path.is_file())
    return others[0] if len(others) == 1 else None


def _is_made_from(fast: Path, model: Path) -> bool:
    """Return whether this tokenizer.json was made from this tokenizer.model, and neither has changed since."""
    hashes = read_object(fast.with_name("tokenizer_config.json")).get(HASHES_KEY)
    return isinstance(hashes, dict) and all(
        hashes.get(file.name) == hashlib.sha256(read_content(file)).hexdigest() for file in (model, fast))


def _other_files(folder: Path) -> str:
    """Name a file of a tokenizer that cannot be read."""
    kinds = {**{f"*{each.suffix}": f"one of several {each.suffix[1:]} files" for each in _formats() if each.suffix},
             "tekken.json": "a tekken file, which is not supported",
             "vocab.txt": "a WordPiece vocabulary, which is not supported",
             "vocab.json": "a vocabulary without merges.txt, which is not supported"}
    found = [f"; {file.name} is {kind}" for pattern, kind in kinds.items() for file in sorted(folder.glob(pattern))]
    return found[0] if found else ""


def _load_sentencepiece(path: Path, content: bytes) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        vocab_size = processor.vocab_size()
    except (RuntimeError, ValueError):
        vocab_size = 0
    if vocab_size == 0:
        raise ConfigError(f"--tokenizer {path}", problem=f"SentencePiece cannot read its {len(content)} bytes",
                          remedy="give a SentencePiece .model or a tokenizer.json; `ds-pretrain tokenizer` trains one")
    ids = sentencepiece_ids(processor)
    _check_added_tokens(path, ids.vocab_size)

    def decode(tokens: Sequence[int]) -> str:
        return str(processor.decode([int(token) for token in tokens]))

    def token_of(name: str) -> int | None:
        token = int(processor.piece_to_id(name))
        return token if processor.id_to_piece(token) == name else None  # an unknown name gets the token <unk>

    return Tokenizer(path, ids, hashlib.sha256(content).hexdigest(), sentencepiece_batch(processor, content, ids),
                     decode, token_of)


def _check_added_tokens(path: Path, vocab_size: int) -> None:
    """Raise ConfigError if JSON files next to a tokenizer.model add tokens to it, and no tokenizer.json has them."""
    if path.name != "tokenizer.model" or path.with_name("tokenizer.json").exists():
        return
    added = read_object(path.with_name("added_tokens.json"))
    decoder = read_object(path.with_name("tokenizer_config.json")).get("added_tokens_decoder")
    listed = [*added.values(), *(decoder if isinstance(decoder, dict) else ())]
    beyond = [token for token in listed if str(token).isdigit() and int(token) >= vocab_size]
    if beyond:
        raise ConfigError(f"--tokenizer {path}", problem=f"the files next to it add token {beyond[0]} to its "
                          f"{vocab_size} tokens, which only a tokenizer.json can have",
                          remedy="load and save the tokenizer with transformers, which writes a tokenizer.json")


def _load_huggingface(path: Path, content: bytes) -> Tokenizer:
    library = read_library(path, content)
    if path.name == "vocab.json":
        content += read_content(path.with_name("merges.txt"))

    def encode_texts(texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread; --workers starts processes
        encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        return join_tokens([encoding.ids for encoding in encodings], ids)

    def decode(tokens: Sequence[int]) -> str:
        return str(library.decode([int(token) for token in tokens], skip_special_tokens=True))

    vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ids = find_special_tokens(path.parent, library.token_to_id, vocab_size)
    return Tokenizer(path, ids, hashlib.sha256(content).hexdigest(), encode_texts, decode, library.token_to_id)


def encode_bytes(texts: Sequence[str]) -> tuple[Integers, npt.NDArray[np.int64]]:
    """Return the bytes of all texts one after another, and the position at which each text ends."""
    encoded = [text.encode() for text in texts]
    tokens = np.frombuffer(b"".join(encoded), np.uint8).astype(BYTE_IDS.dtype)
    return tokens, np.cumsum([len(data) for data in encoded], dtype=np.int64)


def decode_bytes(tokens: Sequence[int]) -> str:
    """Return the text of tokens without special tokens. Bytes that are not UTF-8 become U+FFFD."""
    return bytes(int(token) for token in tokens if token < 256).decode("utf-8", "replace")
