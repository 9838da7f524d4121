"""Suggestions in the line of an error, as far as a program understands them: `suggestions_of` reads the line."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_WORD = r"""(?:"[^"]*"|[\w.+-]+)"""
_IN_FILE = re.compile(r"(?P<file>\S+\.(?:json|yaml|hosts))(?::(?P<line>\d+))?(?:: (?P<key>[\w.-]+))?: (?P<rest>.*)")
_OVERRIDE = re.compile(r"--model_overrides:? (?P<key>[\w.]+): (?P<rest>.*)")
_OF_FLAG = re.compile(r"(?P<flag>--[\w-]+)(?: / (?P<other>--[\w-]+))?(?: [^:]*(?::(?! )[^:]*)*)?: (?P<rest>.*)")
_VALUES = re.compile(r"(?:.*?: )?found (?P<found>.*?); expected (?P<expected>.*)", re.DOTALL)
_SENTENCES = re.compile(r"\.? (?=--model)|\. (?=[A-Z`\"-])|\? (?=[A-Z-])")
_EXAMPLES = {"a whole number": "1", "a number": "1", "a finite number": "1", "an object: { ... }": "{}",
             "a string": '"x"', "a list": "[]", "a list of strings": '["x"]', "a list of two numbers": "[0.5, 0.9]",
             "an integer of at most 64 bits": "1"}


class Target(NamedTuple):
    """The flag, or the line or key of a file, that an error names first."""

    flag: str = ""
    other_flag: str = ""  # of "--first / --second"
    override: str = ""  # key of --model_overrides
    file: str = ""
    line: int = 0
    key: str = ""  # dotted; "": the line itself


class Suggestion(NamedTuple):
    """One thing to do.

    `action`: set, bare (without a value), remove, rename, flag, remove_flag, override, merge, line, mkdir or ranks.
    """

    action: str
    name: str = ""
    value: str = ""
    is_literal: bool = False  # the line has this very value, which must not be rejected next


class Line(NamedTuple):
    """The parts of an error."""

    target: Target
    found: str  # "": the line describes a problem
    expected: str  # or the problem
    remedy: str

    @property
    def asks(self) -> tuple[object, ...]:
        """All parts but the value that was found, and the number of its line."""
        return self.target._replace(line=0), self.expected, self.remedy


def parse_line(text: str) -> Line:
    """Divide the line of an error, without its beginning `ds-pretrain: error: `, into its parts."""
    target, rest = Target(), text
    if match := _OVERRIDE.fullmatch(text):
        target, rest = Target("--model_overrides", override=match["key"]), match["rest"]
    elif match := _OF_FLAG.fullmatch(text):
        target, rest = Target(match["flag"], match["other"] or ""), match["rest"]
    elif match := _IN_FILE.fullmatch(text):
        target, rest = Target(file=match["file"], line=int(match["line"] or 0), key=match["key"] or ""), match["rest"]
    values = _VALUES.fullmatch(rest)
    first, *others = _SENTENCES.split((values["expected"] if values else rest).removesuffix("."), maxsplit=1)
    return Line(target, values["found"] if values else "", first, others[0] if others else "")


def suggestions_of(line: Line) -> list[Suggestion]:
    """Return what the line suggests, each once; [] if no part of it is understood."""
    return list(dict.fromkeys([*_remedies(line), *_values(line)]))


def _remedies(line: Line) -> Iterator[Suggestion]:
    """Yield what is written as an instruction."""
    text = f"{line.remedy or line.expected}."
    is_name = line.found.startswith(("an unknown key", "unknown keys")) or \
        re.match("there is no such flag|this is not a key", line.expected) is not None
    if match := re.search(r'Did you mean "([^"]+)"(?: under "([^"]+)"| (at the top level))?\?', text):
        place = "." if match[3] else match[2] or ""
        yield Suggestion("rename", match[1], place, is_literal=True) if is_name else \
            Suggestion("set", value=match[1], is_literal=True)
    if match := re.search(r'it belongs (?:under "([^"]+)"|at the top level)', text, re.IGNORECASE):
        yield Suggestion("rename", "", match[1] or ".", is_literal=True)
    if match := re.search(r'move (?:the block out of "\w+"|it there)|use "(\w+)" at the top level|'
                          r'[Ww]rite "(\w+)" instead', text):
        yield Suggestion("rename", match[1] or match[2] or "", ".", is_literal=True)
    yield from _removals(line, text)
    yield from _lines_and_places(line, text)
    if "with deepspeed" not in text and line.target.flag != "--target":  # flags of the launcher; keys of a run's file
        yield from _flags(text)
    for snippet in re.findall(r'"\w+": (?:\{(?:[^{}]|\{[^{}]*\})*\}|"[^"]*"|true|false|\d+)', text):
        if "..." not in snippet and "NAME" not in snippet:
            number = re.match(r"\d+", line.found)
            is_instead = re.match(r"write (?!type)", text, re.IGNORECASE) is not None
            if not re.match(r"write type", text, re.IGNORECASE):
                yield Suggestion("merge", "instead" if is_instead else "",
                                 re.sub(r"\bN\b", number[0] if number else "2", snippet), is_literal=True)
    for key, value in re.findall(rf"\b[Ss]et (\w+) to ({_WORD})", text):
        yield Suggestion("set", "" if key == "it" else key, value.rstrip("."), is_literal=True)
    if match := re.search(r'(?:^|; )(?:use|write) (?:type )?("\w+"(?!:| at| instead)|true|false|null)', text,
                          re.IGNORECASE):
        yield Suggestion("set", value=match[1], is_literal=True)
    if re.search(r"\buse AdamW\b", text, re.IGNORECASE):
        yield Suggestion("merge", value='"optimizer": {"type": "AdamW"}', is_literal=True)


def _removals(line: Line, text: str) -> Iterator[Suggestion]:
    """Yield the flags and keys that the reader shall leave out."""
    first = rf"{line.expected}. {text}"
    if re.search(r"\bremove (it|the key|keys that|unknown keys|the flag|this key|(?:the )?block|one of (?:the|them))\b|"
                 r"\bleave (it|the flag|both) out\b|\bomit\b|^no (value|such key)\b|--help lists the flags", first,
                 re.IGNORECASE):
        yield Suggestion("remove", "block" if "remove the block" in text.lower() else "")
    if match := re.search(r'or the "(\w+)" block', text):
        yield Suggestion("remove", f"{match[1]}.block")
    for flag in re.findall(r"\b(?:leave|remove) (--\w+)", text, re.IGNORECASE):
        yield Suggestion("remove_flag", flag)
    if line.target.other_flag and "one of the two" in first:
        yield Suggestion("remove_flag", line.target.other_flag)
        yield Suggestion("remove_flag", line.target.flag)
    if "this flag takes no value" in first:
        yield Suggestion("bare")


def _lines_and_places(line: Line, text: str) -> Iterator[Suggestion]:
    """Yield lines of a hostfile, paths, and numbers of ranks."""
    if match := re.search(r"\bwrite `([^`]+)`", text, re.IGNORECASE):
        yield Suggestion("line", match[1], is_literal=True)
    if re.search(r"\b(start|begin) the line with (the name of a host, or with )?#", text, re.IGNORECASE):
        yield Suggestion("line", "#")
    if match := re.search(r"without \.\w+: '?([^' ]+?)'?\.?$", f"{line.expected}. {text}"):
        yield Suggestion("set", value=match[1], is_literal=True)
    if match := re.match(r"the ~ of '~/([^']*)' was not expanded", line.expected):
        yield Suggestion("set", value="{world}/" + match[1])
    if match := re.match(r"there is no folder (\S+)$", line.expected):
        yield Suggestion("mkdir", match[1])
    if re.search(r"\b(choose|name) (a|another|a new) folder( that can be| elsewhere| outside|\.)", text, re.IGNORECASE):
        yield Suggestion("set", value="{world}/another")
    if match := re.search(r"\blaunch (\d+)", text, re.IGNORECASE):
        yield Suggestion("ranks", value=match[1])


def _flags(text: str) -> Iterator[Suggestion]:
    """Yield flags that are written with a value."""
    for flag, value in re.findall(r"(--\w+) ([\w.]+=[\w.]+)", text):
        action = "override" if flag == "--model_overrides" else "flag"
        yield Suggestion(action, flag, value.rstrip("."), is_literal=True)
    for flag, value in re.findall(r"(--\w+) [A-Z]+, such as ([\w.:]+)", text):
        yield Suggestion("flag", flag, value.rstrip("."), is_literal=True)
    for flag, value in re.findall(r"(--\w+) (N\b|\d[\w.-]*|\w+(?= selects|,? or\b|\.$))(?!=)", text):
        if value not in ("out", "too", "has", "gives", "instead"):
            yield Suggestion("flag", flag, "4" if value == "N" else value.rstrip("."), is_literal=True)


def _values(line: Line) -> Iterator[Suggestion]:
    """Yield the values that the line describes: those of a list, the ends of a range, an example."""
    for match in re.finditer(r"^(?:.{0,80}\b)?such as (\S+?)[,.;:]*(?= |$)", line.expected):
        yield Suggestion("set", value=match[1], is_literal=True)
    is_scalar = re.fullmatch(r"""'[^']*'|"[^"]*"|\S*|\[.*\]|nothing""", line.found) is not None
    if line.found and is_scalar and "unknown key" not in line.found:
        yield from (Suggestion("set", value=value) for value in _literals(line.expected) or _described(line.expected))


def _literals(text: str) -> list[str]:
    """Return the first and the last value of a list, or the only value."""
    if text.startswith("true or false"):
        return ["false", "true"]
    listed = re.match(rf"(?:one of:? )?({_WORD}(?:, (?!as |because ){_WORD})*(?:,? or {_WORD})?)"
                      r"(?= \(| with | at | in |, (?:as|because) |$)", text)
    if listed is None or re.match(r"(a|an|the|no|at|one|up|below|above|another|all|also|more|numbers)\b", listed[1]):
        return []
    words = re.split(r"(?:,? or |, )", listed[1])
    is_value = re.fullmatch(rf'{_NUMBER}|true|false|null|"[^"]*"', words[0])
    is_list = len(words) > 1 or text.startswith("one of")
    return list(dict.fromkeys((words[0], words[-1]))) if is_list or is_value else []


def _described(text: str) -> Iterator[str]:
    """Yield values at the ends of a range, or an example of a type."""
    kind = r"(?:an? (?:whole |finite |even )?(?:number|integer|fraction|probability|list of two numbers)" \
           r"(?: of [a-z]+)?,? )?"
    if match := re.match(rf"{kind}(from|at least|at most|up to|more than) (?:the \S+ \S+ |the [a-z_' ]+, |[a-z_]+, )?"
                         rf"({_NUMBER})(?:-\d+)?(?: to (?!below)({_NUMBER}))?", text):
        for number in filter(None, match.groups()[1:]):
            plain = number.replace(",", "")
            value = str(int(plain) + 1) if match[1] == "more than" else plain
            yield f"[{value}, {value}]" if text.startswith("a list of two") else value
    elif match := re.match(rf"({_NUMBER}) to ({_NUMBER})", text):
        yield from match.groups()
    elif match := re.match(rf"a multiple of ({_NUMBER})", text):
        yield match[1]
    elif match := re.match(rf"{kind}(above|below) ({_NUMBER})(?: (?:and|to|up to)[a-z ]* ({_NUMBER}))?", text):
        edge = float(match[2].replace(",", ""))
        inside = edge + 1 if match[1] == "above" else edge / 2
        yield match[3] or (f"{int(inside)}" if inside.is_integer() else f"{inside:g}")
    elif match := re.match(r"a divisor of (?:the )?(?:model's )?(\d+)", text):
        yield "2" if int(match[1]) % 2 == 0 else match[1]
    elif text in _EXAMPLES:
        yield _EXAMPLES[text]
