"""Read a DeepSpeed JSON with comments and trailing commas, and record the line of each key."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pretrain.errors import ConfigError
from pretrain.shipped import find_layout
from pretrain.stored_json import read_settings

_SPACE = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_LITERALS = {"true": True, "false": False, "null": None, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LITERAL = re.compile(r"-?[A-Za-z_]\w*")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_DEEPEST = 32
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class DsFile:
    """A DeepSpeed JSON as the user wrote it."""

    path: str
    values: dict[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)  # path of keys -> line number, from 1
    imports_code: bool = False  # a flag names the file: only then it may name the user's code

    def where(self, dotted: str) -> str:
        """Return `file:line: dotted.key`. The line belongs to the key, or to its innermost block that the file has."""
        keys = tuple(dotted.split("."))
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.lines:
                return f"{self.path}:{self.lines[keys[:length]]}: {dotted}"
        return f"{self.path}: {dotted}"

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or `default` if the file does not have it."""
        return get_value(self.values, dotted, default)


def get_value(values: Mapping[str, Any], dotted: str, default: Any = None) -> Any:
    """Return `values["a"]["b"]` for "a.b", or `default` if a part is missing."""
    node: Any = values
    for key in dotted.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return default
        node = node[key]
    return node


def read_ds_config(path: str, *, flag: str = "--deepspeed_config") -> DsFile:
    """Read the file that `flag` names.

    Raises:
        ConfigError: with file and line, for text that is not a JSON object, and for duplicate keys.
    """
    if not path:
        raise ConfigError(flag, found="nothing", expected="a DeepSpeed JSON file",
                          remedy="give a file, or the name of one that `ds-pretrain config` lists")
    path = str(find_layout(path, flag))
    try:
        text = read_settings(path)
    except OSError as error:
        raise ConfigError(flag, problem=f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(flag, problem=f"{path} is not UTF-8 text") from None
    return replace(parse_ds_config(path, text), imports_code=True)


def parse_ds_config(path: str, text: str) -> DsFile:
    """Parse the text of a JSON. `path`: for errors. Raises ConfigError as `read_ds_config` does."""
    parser = _Parser(path, text)
    values = parser.document()
    return DsFile(path, values, parser.lines)


class _Parser:
    """Recursive-descent parser. json.loads neither allows comments nor returns line numbers."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.position = path, text, 0
        self.lines: dict[tuple[str, ...], int] = {}

    def document(self) -> dict[str, Any]:
        self._skip()
        if not self._peek("{"):
            raise self._error("an object: { ... }")
        values = self._object(())
        self._skip()
        if self.position < len(self.text):
            raise self._error("the end of the file after the closing brace")
        return values

    def _value(self, keys: tuple[str, ...]) -> Any:
        if len(keys) > _DEEPEST:
            raise self._error(f"at most {_DEEPEST} levels")
        if self._peek("{"):
            return self._object(keys)
        if self._peek("["):
            return self._list(keys)
        if self._peek('"'):
            return self._string("a closed string")
        if number := _NUMBER.match(self.text, self.position):
            return self._number(number)
        word = _LITERAL.match(self.text, self.position)
        if word is None or word[0] not in _LITERALS:
            raise self._error("a value: a number, a string in double quotes, true, false, null, {...} or [...]")
        self.position = word.end()
        return _LITERALS[word[0]]

    def _number(self, found: re.Match[str]) -> Any:
        """Read a finite number; integers have at most 64 bits, because later libraries fail on larger ones."""
        digits = found[0].lstrip("-")
        if digits.isdigit() and (len(digits) > len(str(_LARGEST)) or int(digits) > _LARGEST):
            raise self._error("an integer of at most 64 bits")
        value = json.loads(found[0])
        if not math.isfinite(value):
            raise self._error("a finite number")
        self.position = found.end()
        return value

    def _object(self, keys: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._take("{")
        while not self._peek("}"):
            line = self._line()
            name = self._string('a key in double quotes, or "}"')
            path = (*keys, name)
            if name in values:
                dotted = ".".join(path)
                raise ConfigError(f"{self.path}:{line}: {dotted}",
                                  problem=f"the same key is on line {self.lines[path]}",
                                  remedy="remove one of the two")
            self.lines[path] = line
            self._take(":")
            values[name] = self._value(path)
            self._skip()
            if not self._peek("}"):
                self._take(",")
        self._take("}")
        return values

    def _list(self, keys: tuple[str, ...]) -> list[Any]:
        values: list[Any] = []
        self._take("[")
        while not self._peek("]"):
            values.append(self._value((*keys, str(len(values)))))
            self._skip()
            if not self._peek("]"):
                self._take(",")
        self._take("]")
        return values

    def _string(self, expected: str) -> str:
        found = _STRING.match(self.text, self.position)
        if found is None:
            raise self._error(expected)
        try:
            value = json.loads(found[0])
        except json.JSONDecodeError:
            raise self._error("a string with JSON's own escapes") from None
        if _UNPRINTABLE.search(value):
            raise self._error("a string of printable characters")
        self.position = found.end()
        return str(value)

    def _peek(self, character: str) -> bool:
        return self.text.startswith(character, self.position)

    def _take(self, character: str) -> None:
        self._skip()
        if not self._peek(character):
            raise self._error(f'"{character}"')
        self.position += 1
        self._skip()

    def _skip(self) -> None:
        found = _SPACE.match(self.text, self.position)
        self.position = found.end() if found else self.position

    def _line(self) -> int:
        return self.text.count("\n", 0, self.position) + 1

    def _error(self, expected: str) -> ConfigError:
        rest = self.text[self.position:].split("\n")[0].strip()[:40]
        return ConfigError(f"{self.path}:{self._line()}", found=repr(rest) if rest else "the end of the line or file",
                           expected=expected, remedy="the file must be JSON; // and # comments are allowed")
