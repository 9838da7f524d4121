"""Decode text and JSON, and make folders for files."""

import json
import os
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError


def decode_utf8(data: bytes, path: str, first_line: int) -> str:
    """Decode UTF-8. Raises ConfigError that names file and line; `first_line` is the number of the first line."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ConfigError(f"{path}:{line}", found=f"byte 0x{data[error.start]:02X}", expected="UTF-8 text",
                          remedy="convert the file first, for example with iconv -t UTF-8") from None


def check_unicode(text: str, where: str) -> None:
    """Raise ConfigError for text that UTF-8 cannot represent: tokenizers replace such characters in different ways."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise ConfigError(where, problem=f"there is a lone surrogate {code} at character {error.start}",
                          remedy="correct or remove this document") from None


def check_nul(text: str, where: str) -> None:
    """Raise ConfigError for a document with a NUL character."""
    if "\0" in text:
        raise ConfigError(where, problem=f"there is a NUL character (U+0000) at character {text.index(chr(0))}: the "
                          "document is damaged, or no text", remedy="correct or remove this document")


def parse_json(text: str) -> Any:
    """Parse JSON. A number may have any number of digits: Python's int takes at most 4,300. Raises ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)


def make_folder(path: Path) -> Path:
    """Create the folder if needed, and return it. Raises ConfigError if it cannot be created or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(path), problem=f"this folder cannot be created: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(str(path), problem="you may not write to this folder")
    return path
