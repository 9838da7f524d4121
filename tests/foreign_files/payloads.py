"""Hostile texts, and copies of values in which some texts are replaced by them."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MARK = "FOREIGN"  # in the texts that HTML, YAML and scripts must not contain as such
MODULE = "foreign_module"  # lies in the working folder, in the run folder and in PYTHONPATH's place


def payloads(victim: Path) -> list[str]:
    """Return texts with the syntax of programs that might read them. `victim`: a folder that must not change.

    The last ones are names of places: files, hosts, modules.
    """
    touch = f"touch {victim}/{MARK}"
    return [
        "A" * 70_000, "9" * 400, "nan", "-1", "1e999", "true", "null",
        f"x\nnotify_command: {touch}\nmodel_code: {MODULE}:Config\ndataset_module: {MODULE}:build\n",
        f"x\r\n{touch}\r\n", f'x", "notify_command": "{touch}', f"'; {touch}; '", f'"; {touch}; "', f"$({touch})",
        f"`{touch}`", f"| {touch}", f"-oProxyCommand={touch}", f"END_OF_FILE\n{touch}\n", f"&& {touch} #",
        f"!!python/object/apply:os.system ['{touch}']", "*alias", "{{7*7}}${7*7}", "%s%n%x{0}{x.__class__}{:>9999999}",
        f"</script><script>alert('{MARK}')</script>", f"<img src=x onerror=alert('{MARK}')>", "]]>--><!--&lt;&#x3c;",
        "\x1b]0;title\x07\x1b[2J\x9b31m", "a\rb\x08\x7f", "\u202egnp.exe\u2066", "\0", "\ud800", "\ufeff",
        "\u2028x\u0085",
        f"{victim}/{MARK}", f"{victim}/secret.txt", f"../../../../../../../../../..{victim}/{MARK}", "~/.bashrc",
        "/proc/self/mem", "/dev/zero", "/dev/stdin", f"file://{victim}/secret.txt", ".", "..", "/", "", " ", "-",
        "--help",
        "foreign.invalid", "user@foreign.invalid", "http://foreign.invalid/x", "https://foreign.invalid/x.json",
        "s3://foreign-bucket/x", "hf://datasets/foreign/x", "tcp://foreign.invalid:1", "foreign-org/foreign-model",
        "10.255.255.1:22", f"{MODULE}:Config", f"{MODULE}:build", f"{MODULE}.py", "os:system", "builtins:eval"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all values that are no containers, and of empty ones."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from leaves(each, (*path, key))
    if path and not items:
        yield path


def replaced(value: Any, path: Sequence[Any], new: Any) -> Any:
    """Return a copy with another value at a path."""
    if not path:
        return new
    if isinstance(value, list):
        return [replaced(each, path[1:], new) if number == path[0] else each for number, each in enumerate(value)]
    return {**value, path[0]: replaced(value.get(path[0]), path[1:], new)}


def named_places(value: Any, places: Sequence[str], texts: Sequence[str], numbers: random.Random,
                 count: int) -> Iterator[tuple[str, Any]]:
    """Yield copies in which one of some places has a text: a pairwise selection, or all if `count` is large."""
    pairs = [(place, text) for place in places for text in texts]
    for place, text in numbers.sample(pairs, min(count, len(pairs))):
        path = [int(word) if word.isdecimal() else word for word in place.split(".")]
        yield f"{place} = {text[:80]!r}", replaced(value, path, text)


def hostile_copies(value: Any, texts: Sequence[str], numbers: random.Random, count: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, copy): one to three values or keys, or all texts, become hostile texts."""
    places = list(leaves(value))
    for _ in range(count):
        text, kind = numbers.choice(texts), numbers.random()
        if kind < 0.1:
            strings = [path for path in places if isinstance(_at(value, path), str)]
            copy = value
            for path in strings:
                copy = replaced(copy, path, text)
            yield f"all texts: {text[:80]!r}", copy
            continue
        chosen = numbers.sample(places, min(len(places), numbers.choice((1, 1, 2, 3))))
        copy = value
        for path in chosen:
            copy = replaced(copy, path, text)
        if kind > 0.9:
            parent = chosen[0][:-1]
            if isinstance(_at(copy, parent), dict):
                copy = replaced(copy, parent, {**_at(copy, parent), text: text})
        yield f"{['.'.join(map(str, path)) for path in chosen]}: {text[:80]!r}", copy


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def escapes(text: str) -> str:
    """Return what a text must not contain: HTML of a foreign file, or the controls of a terminal."""
    controls = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    return f"control {controls[0]!r}" if controls else ""


def html_of(page: str) -> str:
    """Return the foreign markup in a page."""
    found = re.search(rf"<script>alert\('{MARK}|<img src=x|<!--&lt;", page)
    return found[0] if found else ""


def dumped(name: str, value: Any) -> str:
    """Return the text of a file: JSON, or rows of JSON."""
    return "".join(f"{json.dumps(row)}\n" for row in value) if name.endswith("jsonl") else json.dumps(value, indent=1)
