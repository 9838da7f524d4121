"""Apply what the line of an error suggests, and read the next line, until the input is accepted."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.wrong_inputs.case import Case
from tests.wrong_inputs.suggestions import Line, Suggestion, Target, parse_line, suggestions_of

_LONGEST = 6  # lines, one after the other
ACCEPTED = ""


@dataclass
class Result:
    """Outcome of the suggestions of one line."""

    num_suggestions: int = 0
    num_applied: int = 0  # those that change the input
    num_accepted: int = 0  # those after which the input is accepted, at once or after further suggestions
    problems: list[str] = field(default_factory=list)


def try_remedies(case: Case, line: str, run: Callable[[Case], str], world: Path) -> Result:
    """Apply each suggestion of a line to the case, and follow the lines after it.

    `run` returns the line of an error, without its beginning, or ACCEPTED.
    """
    result = Result()
    parsed = parse_line(line)
    for suggestion in suggestions_of(parsed):
        result.num_suggestions += 1
        changed = applied(case, parsed.target, suggestion, world)
        if changed is not None:
            result.num_applied += 1
            lines, problem = _follow(changed, [line], suggestion, run, world)
            result.num_accepted += lines[-1] == ACCEPTED
            if problem:
                result.problems.append("\n      ".join([f"{case.name}: {problem}", *lines]))
    return result


def _follow(case: Case, lines: list[str], suggestion: Suggestion, run: Callable[[Case], str],
            world: Path) -> tuple[list[str], str]:
    """Return the lines until the input is accepted, or no suggestion is left, and what is wrong with them.

    A line that follows may have several suggestions: one of them must lead on.
    """
    line = run(case)
    before, parsed, lines = parse_line(lines[-1]), parse_line(line), [*lines, line]
    if line == ACCEPTED:
        return lines, ""
    if parsed.asks == before.asks or line in lines[:-1]:
        return lines, f"after {_show(suggestion)}, a line repeats"
    if suggestion.is_literal and _rejects(parsed, before, suggestion):
        return lines, f"the line suggests {_show(suggestion)}, which is rejected"
    failure = lines, ""
    for following in suggestions_of(parsed) if len(lines) <= _LONGEST else ():
        changed = applied(case, parsed.target, following, world)
        if changed is not None:
            found = _follow(changed, lines, following, run, world)
            if not found[1]:
                return found
            failure = found
    return failure


def _show(suggestion: Suggestion) -> str:
    return " ".join(filter(None, suggestion[:3]))


def _rejects(line: Line, before: Line, suggestion: Suggestion) -> bool:
    """Return whether a line rejects the value that the line before it had suggested for the same setting."""
    value = (suggestion.value if suggestion.action == "set" else suggestion.name).strip('"')
    found = line.found.strip("'\"")
    is_same = line.target == before.target and line.expected != "no value"
    return is_same and suggestion.action in ("set", "line", "rename") and value in (found, found.partition(" ")[0])


def applied(case: Case, target: Target, suggestion: Suggestion, world: Path) -> Case | None:
    """Return the case with one change; None if the suggestion does not fit it, or changes nothing."""
    words, files = list(case.words), dict(case.files)
    action, name, value, _ = suggestion
    if action == "ranks":
        _set_flag(words, "--world_size", value)
    elif action in ("flag", "remove_flag"):
        _set_flag(words, name, value if action == "flag" else None)
    elif action == "mkdir":
        files[f"{name.replace('{world}/', '')}/.made"] = b""
    elif action == "override":
        _change_override(words, *value.split("="))
    elif target.override and action in ("set", "remove", "rename"):
        _change_override(words, target.override, value.strip('"') if action == "set" else None, name)
    elif target.flag:
        _change_flag(words, target.flag, suggestion)
    elif target.line and not target.file.endswith(".json") and action in ("line", "remove"):
        _change_line(files, target, name if action == "line" else "", world)
    if action == "merge" or (target.key and target.file.endswith(".json")):
        _change_json(files, words, target, suggestion, world)
    changed = Case(case.name, case.program, tuple(words), case.culprit, tuple(files.items()))
    return None if changed == case else changed


def _change_flag(words: list[str], flag: str, suggestion: Suggestion) -> None:
    """Change the flag that the line names, in place."""
    action, name, value, _ = suggestion
    if action == "set":
        _set_flag(words, flag, value.strip('"'))
    elif action == "remove":
        _set_flag(words, flag, None)
    elif action == "bare":
        words[:] = [flag if word.startswith(f"{flag}=") else word for word in words]
    elif action == "rename":
        words[:] = [name + word[len(flag):] if word.partition("=")[0] == flag else word for word in words]


def _set_flag(words: list[str], flag: str, value: str | None) -> None:
    """Give a flag another value, in place; None removes the flag."""
    places = [place for place, word in enumerate(words) if word.partition("=")[0].replace("-", "_") ==
              flag.replace("-", "_")]
    for place in reversed(places):
        end = place + 1
        while "=" not in words[place] and end < len(words) and not words[end].startswith("--"):
            end += 1
        del words[place:end]
    if value is not None:
        at = places[0] if places else words.index("--") if "--" in words else len(words)
        words[at:at] = [flag, value]


def _change_override(words: list[str], key: str, value: str | None, new_name: str = "") -> None:
    """Change or rename one key of --model_overrides, in place; without a value and a name, remove it."""
    at = max((place for place, word in enumerate(words) if word.startswith("--model_overrides")), default=-1)
    text = "" if at < 0 else words[at].partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
    pairs = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    own = pairs.pop(key, "") if value is None else value
    if value is not None or new_name:
        pairs[new_name or key] = own
    _set_flag(words, "--model_overrides", ",".join(f"{name}={each}" for name, each in pairs.items()) or None)


def _text_of(files: dict[str, bytes], file: str, world: Path) -> tuple[str, str]:
    """Return the name of a file in the world, and its text; "" for a file elsewhere."""
    name = file.removeprefix("{world}/")
    if name.startswith("/"):
        return "", ""
    content = files.get(name, (world / name).read_bytes() if (world / name).is_file() else b"")
    return name, content.decode("utf-8", errors="replace")


def _change_line(files: dict[str, bytes], target: Target, new: str, world: Path) -> None:
    """Replace one line of a file, in place; "#" makes it a comment."""
    name, text = _text_of(files, target.file, world)
    lines = text.splitlines()
    if name and target.line <= len(lines):
        lines[target.line - 1] = f"# {lines[target.line - 1]}" if new == "#" else new
        files[name] = "\n".join(lines).encode()


def _change_json(files: dict[str, bytes], words: list[str], target: Target, suggestion: Suggestion,
                 world: Path) -> None:
    """Change one key of a JSON file, in place. A snippet is merged into the DeepSpeed JSON."""
    file = target.file
    if not file.endswith(".json"):
        paths = [following for word, following in pairwise(words) if word == "--deepspeed_config"]
        file, target = paths[-1] if paths else "", Target()
    name, text = _text_of(files, file, world)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict) and _change(document, target.key, suggestion):
        files[name] = json.dumps(document, indent=1).encode()


def _change(document: dict[str, Any], dotted: str, suggestion: Suggestion) -> bool:
    """Change a document in place. Return whether the suggestion fits it."""
    action, new, value, _ = suggestion
    parent, _, name = (new.removesuffix(".block") if new.endswith(".block") else dotted).rpartition(".")
    if new == "block" and name == "type":
        parent, _, name = parent.rpartition(".")
    block = _block(document, parent)
    if action == "merge":
        if new == "instead":
            block.pop(name, None)
        _merge(_block(document, dotted.partition(".")[0]) if value.startswith('"type"') else document,
               json.loads("{" + value + "}"))
    elif action == "set":
        block[new or name] = _json_value(value)
    elif action in ("remove", "rename") and name in block:
        content = block.pop(name)
        if action == "rename":
            (_block(document, value.strip(".")) if value else block)[new or name] = content
    else:
        return False
    return True


def _block(document: dict[str, Any], dotted: str) -> dict[str, Any]:
    for part in filter(None, dotted.split(".")):
        if not isinstance(document.get(part), dict):
            document[part] = {}
        document = document[part]
    return document


def _merge(document: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(document.get(name), dict):
            _merge(document[name], value)
        else:
            document[name] = value


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
