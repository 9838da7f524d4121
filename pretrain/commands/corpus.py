"""Make a corpus from the source files of Python's standard library, which every machine has."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain import cli
from pretrain.errors import ConfigError
from pretrain.paths import make_folder

_LARGEST_FILE_BYTES = 1_000_000  # longer files are tables, not programs
_VALID_FRACTION = 0.05
_EXCLUDED_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """The two files of a corpus, and their size."""

    train: Path
    valid: Path
    num_documents: int
    num_bytes: int
    """size of the text in both files together"""


def python_corpus(out_dir: str | Path, *, megabytes: float = 30, source: str | Path | None = None) -> Corpus:
    """Write out_dir/train.jsonl and valid.jsonl ({"text", "path"} per line) from up to `megabytes` of *.py files.

    `source` is the folder that holds the files (default: the standard library, including its tests if installed).
    Selection, order and split (5% validation) depend only on the relative paths. Raises ConfigError for too few files.
    """
    folder = Path(source or sysconfig.get_path("stdlib"))
    out = make_folder(Path(out_dir))
    final = {name: out / f"{name}.jsonl" for name in ("train", "valid")}
    temporary = {name: path.with_suffix(f".jsonl.tmp-{os.getpid()}") for name, path in final.items()}
    counts = {"train": 0, "valid": 0}
    num_bytes = 0
    try:
        with temporary["train"].open("w") as train, temporary["valid"].open("w") as valid:
            for path, text, is_valid in _documents(folder):
                num_bytes += len(text.encode())
                if num_bytes > megabytes * 1e6 and min(counts.values()) > 0:
                    num_bytes -= len(text.encode())
                    break
                (valid if is_valid else train).write(json.dumps({"text": text, "path": path}) + "\n")
                counts["valid" if is_valid else "train"] += 1
        if min(counts.values()) == 0:
            raise ConfigError(str(folder), problem=f"{sum(counts.values())} usable .py files are too few for a corpus",
                              remedy="install the sources of Python's standard library (Debian: libpython3-stdlib),"
                              " or train on your own text")
        for name in final:
            os.replace(temporary[name], final[name])
    finally:
        for path_left in temporary.values():
            path_left.unlink(missing_ok=True)
    return Corpus(final["train"], final["valid"], sum(counts.values()), num_bytes)


def _documents(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield (relative path, text, is in the validation set) of each distinct file, ordered by the hash of the path."""
    hashed = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if not set(_EXCLUDED_FOLDERS) & set(relative.parts) and path.is_file():
            hashed.append((hashlib.sha256(relative.as_posix().encode()).digest(), relative.as_posix()))
    seen: set[str] = set()
    for digest, name in sorted(hashed):
        text = _source_text(folder / name)
        if text.strip() and text not in seen:
            seen.add(text)
            yield name, text, int.from_bytes(digest[-8:], "big") < _VALID_FRACTION * 2**64


def _source_text(path: Path) -> str:
    """Return the file's text, or "" if it is too long or not UTF-8 (some files of the library's tests are not)."""
    try:
        return path.read_bytes().decode("utf-8") if path.stat().st_size <= _LARGEST_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def main() -> None:
    parser = cli.Parser(description="Write train.jsonl and valid.jsonl from the source files of Python's standard "
                                    "library.")
    parser.add_argument("out", metavar="OUT", type=cli.path, help="folder for train.jsonl and valid.jsonl")
    parser.add_argument("--megabytes", type=cli.number(above=True), default=30,
                        help="largest size of the text in MB (default: %(default)s)")
    args = parser.parse_args()
    corpus = python_corpus(args.out, megabytes=args.megabytes)
    print(f"{corpus.train} and {corpus.valid}: {corpus.num_documents} files, {corpus.num_bytes / 1e6:.1f} MB of text")
