"""A corpus that is already on the machine: the source files of Python's own standard library."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pretrain.data.text import make_folder
from pretrain.errors import ConfigError

_LARGEST_FILE_BYTES = 1_000_000  # what is longer is a table, not a program
_VALID_SHARE = 0.05
_OTHER_PEOPLES = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    train: Path
    valid: Path
    num_documents: int
    num_bytes: int
    """of text, both files together"""


def python_corpus(out_dir: str | Path, *, megabytes: float = 30, source: str | Path | None = None) -> Corpus:
    """out_dir/train.jsonl and valid.jsonl ({"text", "path"} a line), of up to `megabytes` of *.py files.

    `source`: the folder to take them from (default: the standard library's; its tests too, where installed).
    Which files, in which order and on which side of the split (5% validation) hangs on their relative paths alone.
    Raises ConfigError where there are none.
    """
    if megabytes <= 0:
        raise ConfigError("--megabytes", found=str(megabytes), expected="more than 0")
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
            raise ConfigError(str(folder), found=f"{sum(counts.values())} usable .py files",
                              expected="the sources of the standard library", remedy="install them"
                              " (Debian: libpython3-stdlib), or train on your own text")
        for name in final:
            os.replace(temporary[name], final[name])
    finally:
        for path_left in temporary.values():
            path_left.unlink(missing_ok=True)
    return Corpus(final["train"], final["valid"], sum(counts.values()), num_bytes)


def _documents(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """(relative path, text, whether for validation) of each distinct file, in the order of the paths' hashes."""
    hashed = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if not set(_OTHER_PEOPLES) & set(relative.parts) and path.is_file():
            hashed.append((hashlib.sha256(relative.as_posix().encode()).digest(), relative.as_posix()))
    seen: set[str] = set()
    for digest, name in sorted(hashed):
        text = _source_text(folder / name)
        if text.strip() and text not in seen:
            seen.add(text)
            yield name, text, int.from_bytes(digest[-8:], "big") < _VALID_SHARE * 2**64


def _source_text(path: Path) -> str:
    """The file's text, or "" for one that is too long or not UTF-8 (the library's tests hold some on purpose)."""
    try:
        return path.read_bytes().decode("utf-8") if path.stat().st_size <= _LARGEST_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""
