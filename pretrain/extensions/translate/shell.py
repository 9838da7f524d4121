"""Follow a shell script without running it: its variables, conditions and files, and the commands that start programs.

What is not computed (loops, conditions on unknown values, files that other programs write) is remembered by its line,
and so is each variable that depends on it.
"""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.extensions.translate.shell_text import Statement, parts, statements, without_redirections, word_at

Lines = dict[int, str]  # lines that were not understood, with their texts
_BRACES = re.compile(r"\$\{(\w+|[@*])(?:\[([@*]|\d+)\])?(?:(:?[-=+])(.*))?\}", re.DOTALL)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARED = re.compile(r"(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*")
_KEYWORD = re.compile(r"(if|elif|then|else|fi|for|while|until|do|done|case|esac|\{|\})(?=\s|$|\()\s*")
_TEST = re.compile(r"\[\[?\s(.*)\s\]\]?|test\s(.*)", re.DOTALL)
_SED = re.compile(r"s([/|#,:])((?:\\.|(?!\1).)*)\1((?:\\.|(?!\1).)*)\1g?", re.DOTALL)
_SPECIAL = re.compile(r"(?<!\\)[.*\[\]^&]|\\\w")  # in an expression of sed
_COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Div: lambda left, right: int(left / right) if abs(left) < 2**52 else left // right,
    ast.Mod: lambda left, right: left - right * int(left / right)}
_SHELLS = ("bash", "sh")
_DEEPEST, _MOST_BLOCKS, _LARGEST, _MOST_BITS = 5, 50, 2**22, 63


@dataclass(frozen=True)
class Command:
    """A command of the script, with the words that its variables give, and the unclear lines on which it depends."""

    line: int
    words: list[str]
    unclear: Lines


@dataclass
class _Block:
    """An `if`, a loop or a `case` that is being followed."""

    keyword: str
    outer: bool  # the statements around it are followed
    is_followed: bool  # those of the current branch are followed
    had_branch: bool = False
    in_condition: bool = True
    unclear: Lines = field(default_factory=dict)
    assigned: list[str] = field(default_factory=list)  # in a loop


@dataclass
class Script:
    """State of a script that is followed. An unknown variable remains in the texts."""

    file: str
    variables: dict[str, str | list[str]] = field(default_factory=dict)  # a list: an array
    written: dict[str, str | None] = field(default_factory=dict)  # path -> text; None: not known
    commands: list[Command] = field(default_factory=list)
    unclear: dict[str, Lines] = field(default_factory=dict)  # variables and paths
    outputs: dict[str, Lines] = field(default_factory=dict)  # variables that are the output of a command
    _blocks: list[_Block] = field(default_factory=list)
    _touched: Lines = field(default_factory=dict)  # all that the current statement has used
    _truth: bool | None = True  # value of the last condition; None: not known
    _stream: str | None = None  # output of the last command of a pipeline
    _length: int = 0  # characters of all expanded texts

    def follow(self, text: str, within: int = 0, depth: int = 0) -> None:
        """Follow a text of the script. `within`: the line of the command that has the text. Raises ConfigError."""
        for each in statements(self.file, text):
            self._limited(text if within else "")
            line, self._touched = within or each.line, self._unsure()
            if re.match(r"exit\b", each.text) and not each.joint and self._is_followed() and not self._touched:
                return
            self._statement(each, each.text, line, depth)

    def _statement(self, each: Statement, text: str, line: int, depth: int) -> None:
        found = _KEYWORD.match(text)
        block = self._blocks[-1] if self._blocks else None
        if found is None and block and block.in_condition and block.keyword in ("if", "while"):
            self._condition(block, each, text, line)
        elif found is None and not self._is_followed():
            for name, _ in _ASSIGNED.findall(text) if self._unsure() else ():  # it may have another value
                self.unclear[name] = self.unclear.get(name, {}) | self._unsure()
        elif found is None and self._is_reached(each, line):
            self._simple(each, text, line, depth)
        elif found is not None:
            keyword, rest = found[1], text[found.end():]
            if keyword in ("if", "while", "until", "for", "case"):
                self._open(keyword, each, rest, line)
            elif block is not None:
                self._continue(block, keyword, each, rest, line)
            if rest and keyword in ("then", "do", "else", "{"):
                self._statement(each, rest, line, depth)

    def _is_followed(self) -> bool:
        return all(block.is_followed for block in self._blocks)

    def _unsure(self) -> Lines:
        return {line: text for block in self._blocks for line, text in block.unclear.items()}

    def _open(self, keyword: str, each: Statement, rest: str, line: int) -> None:
        if len(self._blocks) > _MOST_BLOCKS:
            raise RecursionError
        block = _Block(keyword, self._is_followed(), self._is_followed() and keyword != "case")
        self._blocks.append(block)
        if keyword in ("if", "while"):
            self._condition(block, each, rest, line)
        if block.is_followed and keyword in ("for", "until", "while"):
            block.unclear[line] = f"{each.text} (a loop; its body is read once)"
        if block.outer and keyword == "case":
            block.unclear[line] = f"{each.text} (not read)"
        if keyword == "for" and (name := re.match(r"\w+", rest)) and block.is_followed:
            self._forget(name[0], block.unclear)

    def _continue(self, block: _Block, keyword: str, each: Statement, rest: str, line: int) -> None:
        if keyword == "elif":
            block.in_condition, block.is_followed = True, block.outer and not block.had_branch
            self._condition(block, each, rest, line)
        elif keyword in ("then", "do"):
            block.in_condition = False
            block.had_branch |= block.is_followed
        elif keyword == "else":
            block.is_followed = block.outer and not block.had_branch
        elif keyword in ("fi", "done", "esac"):
            self._blocks.pop()
            for name in block.assigned:
                self._forget(name, block.unclear)

    def _condition(self, block: _Block, each: Statement, text: str, line: int) -> None:
        """Apply a condition, or the next part of one, to its block."""
        if not block.outer or block.had_branch:
            return
        truth = self._truth_of(text)
        if each.joint in ("&&", "||") and text == each.text:
            truth = _both(self._truth, truth, decided=each.joint == "||")
        self._truth, block.is_followed = truth, truth is not False
        if truth is None and block.keyword == "if":
            block.unclear[line] = f"{each.text} (taken as true)"

    def _is_reached(self, each: Statement, line: int) -> bool:
        """Return whether && and || before a statement let it be reached; an unknown condition is taken as true."""
        if each.joint not in ("&&", "||"):
            return True
        if self._truth is None:
            self._touched[line] = f"{each.text} (the condition before it is taken as true)"
        return (self._truth is not False) == (each.joint == "&&")

    def _truth_of(self, text: str) -> bool | None:
        """Return whether a condition holds; None: it is not known."""
        if negated := re.match(r"!\s+", text):
            return _not(self._truth_of(text[negated.end():]))
        if text.startswith("((") and text.endswith("))"):
            value = self._number(text[2:-2])
            return None if value is None else value != 0
        test = _TEST.fullmatch(text)
        if test is None:
            return {"true": True, ":": True, "false": False}.get(text)
        return _holds(self.words(test[1] or test[2] or "", split=False))

    def _forget(self, name: str, lines: Lines) -> None:
        self.variables.pop(name, None)
        self.unclear[name] = self.unclear.get(name, {}) | lines

    def _simple(self, each: Statement, text: str, line: int, depth: int) -> None:
        declared = _DECLARED.match(text)
        position = declared.end() if declared else 0
        pairs: list[tuple[re.Match[str], str]] = []
        while found := _ASSIGNED.match(text, position):
            value = word_at(text, found.end())
            pairs.append((found, value))
            position = found.end() + len(value)
            position += len(text[position:]) - len(text[position:].lstrip())
        if position < len(text) and not declared:
            self._command(each, text[position:], line, depth)
            return
        for found, value in pairs:
            self._assign(found[1], value, line, adds=found[2] == "+")

    def _assign(self, name: str, value: str, line: int, *, adds: bool) -> None:
        self._touched = self._unsure() | (self.unclear.get(name, {}) if adds else {})
        before: str | list[str] = self.variables.get(name, "") if adds else ""
        if value.startswith("("):
            first = [before] if isinstance(before, str) else before
            self.variables[name] = [*(word for word in first if word), *self.words(value[1:-1])]
        else:
            text = (before if isinstance(before, str) else " ".join(before)) + "".join(self.words(value, split=False))
            self.variables[name] = self._limited(text)
            if text in ("$(...)", "$((...))"):
                del self.variables[name]
                self.outputs[name] = {line: f"{name}={value}"}
        self.unclear[name] = self._touched
        for block in self._blocks:
            block.assigned += [name] if block.keyword in ("for", "while", "until") else []

    def _limited(self, text: str) -> str:
        self._length += len(text)
        if self._length > _LARGEST:
            raise ConfigError(self.file, problem="its variables are too large for a script of settings")
        return text

    def _command(self, each: Statement, text: str, line: int, depth: int) -> None:
        bare, targets = without_redirections(text)
        words = self.words(bare) or [""]
        stream, self._stream = self._stream if each.joint == "|" else None, None
        self._truth = self._truth_of(bare) if _TEST.match(bare) or bare.startswith("((") or bare == "false" else True
        inner = [" ".join(words[1:])] if words[0] == "eval" else [
            words[index + 2] for index, word in enumerate(words[:-2]) if word in _SHELLS and words[index + 1] == "-c"]
        if inner:
            if depth < _DEEPEST:
                self.follow(inner[0], line, depth + 1)
        elif words[0] in ("cat", "sed", "echo", "tee"):
            self._stream = self._printed(words, each, stream)
            targets += [words[-1]] if words[0] == "tee" or "-i" in words else []
        elif words[0]:
            self.commands.append(Command(line, words, self._touched))
        for path in ("".join(self.words(target, split=False)) for target in targets[:1]):
            self.written[path] = self._stream
            self.unclear[path] = self._touched | (
                {line: f"{each.text} (what it writes is not known)"} if self._stream is None else {})

    def _printed(self, words: list[str], each: Statement, stream: str | None) -> str | None:
        """Return what cat, sed, echo and tee print; None: not known."""
        name, others = words[0], [word for word in words[1:] if not word.startswith("-")]
        if name == "echo" or name == "tee":
            return " ".join(others) + "\n" if name == "echo" else stream
        changes = [change for word in others if name == "sed" and (change := _SED.fullmatch(word))]
        files = others[len(changes):]
        text = each.body if each.is_literal or each.body is None else self._inside(each.body)
        text = text if text is not None else self._file(files[0]) if files else stream
        if text is None or len(files) > 1 or (name == "sed" and not changes):
            return None
        for change in changes:
            if _SPECIAL.search(change[2]) or _SPECIAL.search(change[3]):
                return None
            text = self._limited(text.replace(re.sub(r"\\(.)", r"\1", change[2]), re.sub(r"\\(.)", r"\1", change[3])))
        return text

    def _file(self, path: str) -> str | None:
        """Return the text of a file that the script has written, or that lies in its folder."""
        if path in self.written:
            self._touched |= self.unclear[path]
            return self.written[path]
        try:
            found = Path(self.file).parent / path
            if not found.is_file():  # no pipe, which would block, and no device
                return None
            with open(found, encoding="utf-8") as stream:
                return stream.read(_LARGEST)
        except (OSError, ValueError):
            return None

    def words(self, text: str, *, split: bool = True) -> list[str]:
        """Return the words of a text. Values of variables without quotes are divided at spaces if `split`."""
        self._limited(text)
        found: list[str] = []
        current: str | None = None
        for part in parts(text):
            value = self._expanded(part)
            if part.isspace():
                found += [] if current is None else [current]
                current = None
            elif isinstance(value, list) or (part[0] in "$`" and split):
                pieces = re.split(r"\s+", value) if isinstance(value, str) else value
                for number, piece in enumerate(pieces):
                    if number and current is not None:
                        found.append(current)
                        current = None
                    current = (current or "") + piece if piece or isinstance(value, list) else current
            else:
                current = (current or "") + value
        return [*found, *([] if current is None else [current])]

    def _expanded(self, part: str) -> str | list[str]:
        """Return the value of a part of a word: a text, or the words of an array."""
        if part[0] == "'" and len(part) > 1:
            return part[1:-1]
        if part[0] == '"' and len(part) > 1:
            value = self._value(part[1:-1]) if re.fullmatch(r'"\$\{\w+\[@\]\}"', part) else ""
            return value if isinstance(value, list) else self._inside(part[1:-1])
        return part[1:] if part[0] == "\\" else self._value(part) if part[0] in "$`" else part

    def _inside(self, text: str) -> str:
        """Return a text in double quotes, or of a here-document."""
        found = []
        for part in parts(text, quotes=False):
            value = self._value(part) if part[0] in "$`" else part
            if part[0] == "\\" and part[1:] in ("$", "`", '"', "\\", "\n"):
                value = part[1:].strip("\n")
            found.append(value if isinstance(value, str) else " ".join(value))
        return self._limited("".join(found))

    def _value(self, part: str) -> str | list[str]:
        """Return the value of $NAME, ${...}, $(...) or `...`. What is not known remains, without spaces."""
        if part.startswith("$(("):
            number = self._number(part[3:-2])
            return "$((...))" if number is None else str(number)
        if part == "$#":  # no arguments are given to the script
            return "0"
        if part[0] == "`" or part.startswith("$("):
            return "$PWD" if part.strip("$()` ") == "pwd" else "$(...)"
        found = _BRACES.fullmatch(part if part.startswith("${") else f"${{{part[1:]}}}")
        if found is None:
            return "${...}" if re.search(r"\s", part) else part
        name, index, sign, other = found.groups()
        self._touched |= self.unclear.get(name, {})
        value = self.variables.get(name)
        if sign and (bool(value) if "+" in sign else value is None or (":" in sign and not value)):
            return "".join(self.words(other, split=False))
        if value is None:
            return "" if sign else part
        if isinstance(value, list) and index not in ("@", "*"):
            return value[int(index or 0)] if int(index or 0) < len(value) else ""
        return value

    def _number(self, text: str) -> int | None:
        """Return the value of $(( ... )); None: it is not known."""
        filled = re.sub(r"(?<![\w$])[A-Za-z_]\w*", lambda name: self._inside(f"${name[0]}"), self._inside(text))
        return computed(filled)


def computed(text: str) -> int | None:
    """Return the value of an expression of whole numbers, as the shell computes it; None: it is none."""
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body) if len(text) <= 200 else None
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr) -> int:
    value: int | None = None
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_computed(node.operand)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        value = int(_OPERATORS[type(node.ops[0])](_computed(node.left), _computed(node.comparators[0])))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_computed(node.left), _computed(node.right))
    if value is None or value.bit_length() > _MOST_BITS:
        raise ValueError("not an arithmetic expression that is known here")
    return value


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _both(left: bool | None, right: bool | None, *, decided: bool) -> bool | None:
    """Join two conditions; `decided`: the value of one that decides (true for "or")."""
    return decided if decided in (left, right) else None if None in (left, right) else not decided


def _holds(words: list[str]) -> bool | None:
    """Return whether the words inside of [ ] hold; None: not known."""
    for signs, decided in ((("||", "-o"), True), (("&&", "-a"), False)):
        for at in (index for index, word in enumerate(words) if word in signs and 0 < index < len(words) - 1):
            return _both(_holds(words[:at]), _holds(words[at + 1:]), decided=decided)
    if words[:1] == ["!"]:
        return _not(_holds(words[1:]))
    if any("$" in word for word in words):
        return None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) != 3:
        return words[0] != "" if len(words) == 1 else None
    left, sign, right = words
    if sign in ("=", "==", "!="):
        return fnmatchcase(left, right) == (sign != "!=")
    value = computed(f"{left} {_COMPARED[sign]} {right}") if sign in _COMPARED else None
    return None if value is None else bool(value)
