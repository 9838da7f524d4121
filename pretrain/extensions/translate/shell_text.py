"""Divide the text of a shell script: into statements, and statements into quoted and nested parts. Nothing is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.errors import ConfigError

NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_CLOSING = {"'": "'", '"': '"', "`": "`", "$(": ")", "(": ")", "${": "}"}
_DEEPEST = 30  # nested parts; more would exhaust the interpreter's stack
_COMMENT = re.compile(r"(?<!\S)#[^\n]*")
_HERE = re.compile(r"<<(-?)[ \t]*(\\|'|\"|)(\w+)['\"]?")
_TEST, _TEST_END = re.compile(r"(?<!\S)\[\[\s"), re.compile(r"\s\]\](?=[\s;&|)]|$)")
_REDIRECTION = re.compile(r"(?:&|\d)?(>>?|<{1,3})(&?)\|?[ \t]*")


@dataclass(frozen=True)
class Statement:
    """A simple command, or a part of a compound one, such as `if [ $A = 1 ]` and `then B=2`."""

    line: int  # its first one, from 1
    text: str
    joint: str = ""  # the operator before it: "|", "&&", "||"; "": none
    body: str | None = None  # text of a here-document
    is_literal: bool = False  # the here-document's variables are not replaced


class _UnclosedError(Exception):
    """Quotes or parentheses that have no end."""


def parts(text: str, *, quotes: bool = True) -> Iterator[str]:
    """Yield the quoted parts of a text, its variables and substitutions, and its other characters one by one.

    A comment becomes a space. Without `quotes`, quotes and parentheses are plain text, as they are inside of double
    quotes. A part without an end is plain text, too.
    """
    position = 0
    while position < len(text):
        is_plain = not quotes and text[position] in "\"'("
        end = position + 1 if is_plain else _tolerant_end(text, position)
        comment = _COMMENT.match(text, position) if quotes and text[position] == "#" else None
        yield " " if comment else text[position:end]
        position = comment.end() if comment else end


def word_at(text: str, position: int) -> str:
    """Return the text of a word, up to a space that is not quoted."""
    end = position
    while end < len(text) and not text[end].isspace():
        end = _tolerant_end(text, end)
    return text[position:end]


def without_redirections(text: str) -> tuple[str, list[str]]:
    """Return a command without > FILE, 2>&1 and < FILE, and the texts of the files that it writes."""
    kept, targets, position = [""], [], 0
    while position < len(text):
        found = _REDIRECTION.match(text, position) if text[position] in "<>&" or kept[-1] == " " else None
        end = found.end() if found else _tolerant_end(text, position)
        if found is None:
            kept.append(" " if text[position:end].isspace() else text[position:end])
        else:
            target = word_at(text, end)
            targets += [target] if found[1][0] == ">" and not found[2] else []
            end += len(target)
        position = end
    return "".join(kept).strip(), targets


def _tolerant_end(text: str, start: int) -> int:
    try:
        return _part_end(text, start)
    except _UnclosedError:
        return start + 1


def _part_end(text: str, start: int, depth: int = 0) -> int:
    """Return the end of what begins at `start`: quotes, a variable, a substitution, an escape, or one character."""
    opening = text[start:start + 2] if text.startswith(("$(", "${"), start) else text[start]
    if opening == "\\":
        return min(start + 2, len(text))
    if opening == "$":
        name = NAME.match(text, start)
        return name.end() if name else start + 1
    if opening not in _CLOSING:
        return start + 1
    closing, position = _CLOSING[opening], start + len(opening)
    if depth > _DEEPEST:
        raise _UnclosedError
    while position < len(text):
        comment = _COMMENT.match(text, position) if opening in ("(", "$(") else None
        if text[position] == closing:
            return position + 1
        if comment:
            position = comment.end()
        elif opening == "'" or (opening == '"' and text[position] in "'("):
            position += 1
        else:
            position = _part_end(text, position, depth + 1)
    raise _UnclosedError


def statements(file: str, text: str) -> Iterator[Statement]:
    """Yield the statements of a script, without comments. Raises ConfigError for quotes that are not closed."""
    position, line, begin, joint = 0, 1, 1, ""
    found: list[str] = []
    here: list[re.Match[str]] = []
    text = text.replace("\r\n", "\n") + "\n"
    while position < len(text):
        rest = text[position:position + 3]
        end, begin = position + 1, begin if found else line
        if operator := _operator(rest, found[-1] if found else ""):
            body, is_literal, end = None, False, position + len(operator)
            if operator == "\n":
                for each in here:
                    (body, end), is_literal = _here_text(text, end, each), bool(each[2])
                here = []
            if found:
                yield Statement(begin, "".join(found).rstrip(), joint, body, is_literal)
            joint = operator if operator in ("|", "&&", "||") else "" if found else joint
            found = []
        elif comment := _COMMENT.match(text, position):
            end = comment.end()
        elif rest.startswith("\\\n"):
            end = position + 2
        elif rest.startswith("<<") and rest != "<<<" and (opened := _HERE.match(text, position)):
            here.append(opened)
            end = opened.end()
        elif found or not rest[0].isspace():
            try:
                end = position + 3 if rest == "<<<" else _part_end(text, position)
                if _TEST.match(text, position):  # inside of it, && and || belong to the condition
                    end = _test_end(text, position)
            except _UnclosedError:
                raise ConfigError(f"{file}: line {line}", problem="it is not a list of words: a quote or parenthesis "
                                  "that begins here has no end") from None
            found.append(text[position:end])
        line += text.count("\n", position, end)
        position = end


def _test_end(text: str, start: int) -> int:
    found = _TEST_END.search(text, start)
    if found is None:
        raise _UnclosedError
    return found.end()


def _operator(rest: str, before: str) -> str:
    """Return the operator that ends a statement, with which `rest` begins; "": none."""
    if rest[:2] in ("&&", "||"):
        return rest[:2]
    if rest[0] in "\n;|":
        return "" if rest[0] == "|" and before == ">" else rest[0]
    return "&" if rest[0] == "&" and before not in (">", "<") and rest[1:2] != ">" else ""


def _here_text(text: str, start: int, opened: re.Match[str]) -> tuple[str, int]:
    """Return a here-document and the position after it. Without its end, it has the rest of the script."""
    end = re.compile(rf"^{chr(9) + '*' if opened[1] else ''}{opened[3]}\n", re.MULTILINE).search(text, start)
    return (text[start:], len(text)) if end is None else (text[start:end.start()], end.end())
