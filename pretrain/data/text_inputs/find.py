"""List the inputs that words of the command line name, and check them before they are read.

An input is a local file, a file of a store or of a web server, or standard input.
"""

import glob
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pretrain.daemon_threads import map_in_threads
from pretrain.data.text_inputs.chunk import Position, ReadSettings
from pretrain.data.text_inputs.dataset import NamedDataset, OpenDataset
from pretrain.data.text_inputs.formats import (
    HEAD_BYTES,
    PARQUET,
    STDIN,
    ByteStream,
    Source,
    compression_of,
    decompressed,
    detect_kind,
    input_name,
    open_source,
    says_jsonl,
    utf16_error,
    utf16_problem,
)
from pretrain.data.text_inputs.other_files import (
    OtherFileError,
    check_readable,
    files_by_kind,
    is_web_page,
    other_files_error,
)
from pretrain.data.text_inputs.parquet import check_parquet
from pretrain.data.text_inputs.stored_file import StoredFile, is_remote, local_path, stored_file, stored_files
from pretrain.errors import ConfigError, counted, file_errors, printable, shorten
from pretrain.remote import is_url, without_credentials

_COMPRESSION_RATIO = 4  # assumed compression of gzip, zstd and Parquet files
_KIND_NAMES = {"text": "text", "jsonl": "JSON lines", "parquet": "Parquet", "rows": "rows"}
_SIDE_FILES = {"_SUCCESS", "_metadata", "_common_metadata", "dataset_info.json", "dataset_infos.json",
               "dataset_dict.json", "MD5SUMS", "SHA1SUMS", "SHA256SUMS", "SHA512SUMS", "Thumbs.db"}
_SIDE_ENDINGS = (".crc", ".md5", ".sha1", ".sha256", ".sha512", ".lock", ".tmp", ".part", ".partial", ".crdownload",
                 "~")


@dataclass(frozen=True)
class Input:
    """A file, or standard input ("-"), whose format is known."""

    path: str  # or the URL
    kind: str  # "text", "jsonl" or "parquet"; of a dataset also "rows": another format
    compression: str = ""  # "gzip", "zstd" or ""
    num_bytes: int = 0  # on disk; 0 for standard input
    head: bytes = b""  # bytes of standard input that were read to detect the format
    stored: StoredFile | None = None  # version of a file at a URL
    dataset: OpenDataset | None = None  # that this file belongs to
    source: str = ""  # the word of the command line that names this file
    is_web_page: bool = False  # a text file that begins as HTML
    start: int = 0  # byte at which reading begins, or row of a Parquet file: above 0 in a part of a file (parts.py)
    stop: int | None = None  # byte or row before which reading ends; None: it ends with the file

    @property
    def name(self) -> str:
        """The path or URL, for messages and records."""
        return input_name(self.path)

    @property
    def name_of_lines(self) -> str:
        """The path before a number of a line, for messages. The lines of a part are counted from its first byte."""
        return self.name if self.start == 0 or self.kind == "parquet" else f"{self.name} (from byte {self.start})"

    @property
    def beginning(self) -> Position:
        """The position at which reading begins."""
        return Position(self.start, self.start + 1 if self.kind == "parquet" else 1)

    @property
    def is_compressed(self) -> bool:
        """True if the text may have more bytes than the file."""
        return bool(self.compression) or self.kind == "parquet"

    @property
    def text_bytes(self) -> int:
        """The approximate size of the text; 0 for standard input."""
        return self.num_bytes * (_COMPRESSION_RATIO if self.is_compressed else 1)

    @property
    def can_resume(self) -> bool:
        """True for files, which can be read from any position. Standard input can be read only once."""
        return self.path != STDIN

    def open(self, copy: Path | None = None) -> Any:
        """Open a file at a URL: see StoredFile. None: the file is local."""
        if self.stored is not None:
            return self.stored.open(copy)
        return stored_file(self.path).open() if self.dataset is not None and is_url(self.path) else None


@dataclass(frozen=True)
class Inputs:
    """All inputs, in the order in which they are read."""

    files: tuple[Input, ...]
    side_files: tuple[str, ...]
    """files of folders that are not read: hidden files, checksums and the like"""
    commits: Mapping[str, str] = field(default_factory=dict)
    """"hf://REPOSITORY@REVISION" -> the commit that is read"""
    other_files: str = ""
    """files of kinds that hold no text, which are left out"""

    @property
    def num_bytes(self) -> int:
        """The size of all files on disk."""
        return sum(file.num_bytes for file in self.files)

    @property
    def is_mixed(self) -> bool:
        """True if there are several formats, files that are not read, files that are read twice, or a dataset."""
        formats = {(file.kind, file.compression) for file in self.files}
        return len(formats) > 1 or bool(self.side_files) or len({file.path for file in self.files}) < len(
            self.files) or self.dataset is not None or bool(self.other_files)

    @property
    def dataset(self) -> OpenDataset | None:
        """The dataset that all files belong to."""
        return self.files[0].dataset

    def describe(self) -> str:
        """Return one line with the formats (which files have which, if there are several), and files that are not read.
        """
        kinds: dict[str, list[str]] = {}
        for file in self.files:
            kind = _KIND_NAMES[file.kind] + (f", {file.compression}" if file.compression else "")
            kinds.setdefault(kind, []).append(Path(file.name).name)
        named = f"{self.dataset.describe()}: " if self.dataset is not None else ""
        line = f"inputs: {named}" + "; ".join(
            f"{counted(len(names), 'file')} of {kind}{f' ({_examples(names)})' * (len(kinds) > 1)}"
            for kind, names in kinds.items())
        repeated = len(self.files) - len({file.path for file in self.files})
        if repeated:
            line += f"; {repeated} of them are read again, because they are named twice"
        if self.side_files:
            names = sorted({Path(path).name for path in self.side_files})
            line += f"; not read: {_examples(names)} ({len(self.side_files)} hidden or side files of folders)"
        if self.other_files:
            line += f"; left out: {self.other_files}"
        pages = [Path(file.name).name for file in self.files if file.is_web_page]
        if pages:
            line += f"; {counted(len(pages), 'web page')} (HTML: {_examples(pages)}), whose markup becomes tokens, too"
        return printable(line)


def _examples(names: Sequence[str]) -> str:
    return shorten(", ".join(names[:3]), 120) + ", ..." * (len(names) > 3)


def find_inputs(words: Sequence[str] | NamedDataset, settings: ReadSettings, earlier: Inputs | None = None) -> Inputs:
    """Return the inputs that files, folders, globs, URLs and "-" name, in this order; folders and globs are sorted.

    Of a dataset, these are its data files.
    earlier: inputs of the same words that an earlier call returned. Its commits of the Hub are read again, and its
    files of stores are not examined again if they have not changed.
    Raises ConfigError for an input that does not exist, cannot be read or has another format, and if all are empty.
    """
    if isinstance(words, NamedDataset):
        dataset = words.open()
        if not dataset.files:
            raise ConfigError(words.flag, problem="this split has no data files")
        return Inputs(tuple(Input(file.path, file.kind, file.compression, file.num_bytes, dataset=dataset,
                                  source=words.name) for file in dataset.files), ())
    if list(words).count(STDIN) > 1:
        raise ConfigError(STDIN, problem="standard input can be read only once", remedy="give - once")
    side_files: list[str] = []
    commits = dict(earlier.commits) if earlier is not None else {}
    known = {file.stored.identity: file for file in earlier.files if file.stored} if earlier is not None else {}
    found: list[tuple[str, str | StoredFile]] = []
    for word in words:
        place = local_path(word)
        names = _files_at(place, commits, side_files) if is_remote(place) else _paths(place, side_files)
        found += [(without_credentials(word), name) for name in names]

    stored = [file for file in dict.fromkeys(file for _, file in found) if isinstance(file, StoredFile)]
    files_of_stores = [(file, None if file.identity in known else file.open()) for file in stored]

    def examine(pair: tuple[StoredFile, Any]) -> Input | OtherFileError:
        file, reader = pair
        if reader is None:
            return replace(known[file.identity], path=file.url, stored=file)
        with closing(reader):
            return _examined(file.url, settings, file, reader)

    examined = dict(zip(stored, map_in_threads(examine, files_of_stores), strict=True))
    all_files = [(word, examined[one] if isinstance(one, StoredFile) else _examined(one, settings))
                 for word, one in found]
    others = [file for _, file in all_files if isinstance(file, OtherFileError)]
    if others and (not settings.skip_errors or len(others) == len(all_files)):
        raise other_files_error(others, settings.can_skip and len(others) < len(all_files))
    files = tuple(replace(file, source=word) for word, file in all_files if isinstance(file, Input))
    if not any(file.num_bytes or file.head for file in files):
        raise ConfigError(without_credentials(" ".join(words)) or "INPUT", problem="there is no text",
                          remedy="give files that are not empty")
    if settings.document_separator and not any(file.kind == "text" for file in files):
        raise ConfigError("--document_separator", problem="it has no effect: none of the inputs is a text file",
                          remedy="leave it out, or give --format text")
    return Inputs(files, tuple(side_files), commits, files_by_kind(others))


def _files_at(url: str, commits: dict[str, str], side_files: list[str]) -> list[StoredFile]:
    """Return the files that a URL names; add files of folders that are not read to `side_files`."""
    def is_left_out(path: str) -> bool:
        *folders, last = path.split("/")
        is_side = any(part.startswith(".") or _is_side_file(part, True) for part in folders) or \
            last.startswith(".") or _is_side_file(last, False)
        side_files.extend([path] * is_side)
        return is_side

    return stored_files(url, commits, is_left_out)


def _paths(word: str, side_files: list[str]) -> Iterator[str]:
    """Yield the files that a word names; add those that are not read to `side_files`."""
    if word == STDIN or os.path.isfile(word):
        yield word
    elif os.path.isdir(word):
        found = list(_files_of_folder(word, side_files))
        if not found:
            raise ConfigError(word, problem="this folder has no files to read")
        yield from found
    elif os.path.lexists(word):
        problem = "it is neither a file nor a folder" if os.path.exists(word) else "this link leads to no file"
        raise ConfigError(word, problem=problem, remedy="to read a pipe, give - and redirect standard input")
    elif glob.has_magic(word):
        matches = sorted(glob.glob(word, recursive=True))
        if not matches:
            raise ConfigError(word, problem="no file matches this pattern")
        recursive = {path for path in matches if os.path.isdir(path)} if "**" in word else set()
        for match in matches:
            if match not in recursive:
                yield from _paths(match, side_files)
    else:
        raise ConfigError(word, problem="there is no such file")


def _files_of_folder(folder: str, side_files: list[str]) -> Iterator[str]:
    """Yield the files below a folder, sorted. Links are followed, unless they lead back to a folder above."""
    above = os.path.realpath(folder)
    with file_errors(folder, "this folder cannot be read: {}"):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        is_folder = entry.is_dir()
        if entry.name.startswith(".") or _is_side_file(entry.name, is_folder):
            side_files.append(entry.path)
        elif is_folder:
            target = os.path.realpath(entry.path)
            if not (entry.is_symlink() and f"{above}/".startswith(f"{target}/")):
                yield from _files_of_folder(entry.path, side_files)
        elif entry.is_file():
            yield entry.path
        else:
            side_files.append(entry.path)


def _is_side_file(name: str, is_folder: bool) -> bool:
    return name == "__pycache__" if is_folder else name in _SIDE_FILES or name.lower().endswith(_SIDE_ENDINGS)


def _examined(path: str, settings: ReadSettings, stored: StoredFile | None = None,
              reader: Any = None) -> Input | OtherFileError:
    try:
        return _examine(path, settings, stored, reader)
    except OtherFileError as error:
        return error


def _examine(path: str, settings: ReadSettings, stored: StoredFile | None = None,
             reader: Any = None) -> Input:
    """Return the input of a file, of a URL, or of standard input, with its format."""
    name = input_name(path)
    if path == STDIN and sys.stdin.isatty():
        raise ConfigError("-", problem="standard input is a terminal", remedy="redirect it: < FILE, or a pipe")
    with open_source(path, reader=reader, keep_open=reader is not None) as source:
        head = source.read(HEAD_BYTES)
    compression = compression_of(head)
    content, is_complete = head, len(head) < HEAD_BYTES
    if compression:
        content, is_complete = _decompressed_head(path, head, compression, reader)
    local_bytes = 0 if path == STDIN or stored is not None else os.path.getsize(path)
    num_bytes = local_bytes if stored is None else stored.size
    kind = _kind(path, name, content, compression, is_complete, settings, reader)
    return Input(path, kind, compression, num_bytes, head if path == STDIN else b"", stored,
                 is_web_page=kind == "text" and is_web_page(content))


def _decompressed_head(path: str, head: bytes, compression: str, reader: Any) -> tuple[bytes, bool]:
    """Return the beginning of the decompressed content, and whether this is all."""
    content = b""
    if path != STDIN and reader is None:
        with open_source(path) as source:
            return _read_head(decompressed(source, compression))
    stream = decompressed(Source(io.BytesIO(head)), compression)
    try:
        while data := stream.read(1024):
            content += data
    except (OSError, EOFError):  # the rest has not been read yet
        if content or reader is None:
            return content, False
        reader.seek(0)
        with open_source(path, reader=reader, keep_open=True) as source:  # the first block of zstd is longer
            return _read_head(decompressed(source, compression))
    return content, len(head) < HEAD_BYTES


def _read_head(stream: ByteStream) -> tuple[bytes, bool]:
    content = b""
    while len(content) < HEAD_BYTES and (data := stream.read(HEAD_BYTES - len(content))):
        content += data
    return content, len(content) < HEAD_BYTES


def _kind(path: str, name: str, content: bytes, compression: str, is_complete: bool, settings: ReadSettings,
          reader: Any) -> str:
    if compression_of(content) and compression:
        raise ConfigError(name, problem="it is compressed twice", remedy="decompress it once")
    check_readable(content, name)
    if content.startswith(PARQUET):
        if settings.format in ("text", "jsonl"):
            raise ConfigError(name, problem=f"this is a Parquet file; {_KIND_NAMES[settings.format]} is expected")
        if compression or path == STDIN:
            raise ConfigError(name, problem="a Parquet file is read from its end, which needs a plain file",
                              remedy="decompress it" if compression else "give its path")
        check_parquet(path, settings.jsonl_key, reader)
        return "parquet"
    if settings.format == "parquet":
        raise ConfigError(name, problem="this is not a Parquet file", remedy="leave --format out")
    if (encoding := utf16_problem(content)) and not settings.skip_errors:
        raise utf16_error(name, encoding)
    if settings.format != "auto":
        return settings.format
    if is_web_page(content) and path.lower().startswith(("http://", "https://")):
        raise ConfigError(name, problem="the server sends a web page (HTML)", remedy="give the URL of the file itself; "
                          "or, if the page is the text, give --format text")
    if is_web_page(content) and (says_jsonl(name) or name.lower().endswith(".parquet")):
        raise ConfigError(name, problem="this is a web page (HTML), although the file's name says otherwise: perhaps "
                          "the error page of a server", remedy="download the file again")
    return detect_kind(content, name, is_complete=is_complete)
