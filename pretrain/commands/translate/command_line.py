"""Read command lines of other programs, and the shell scripts that contain them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_FLAG = re.compile(r"--?[A-Za-z]")
_IF, _FI = re.compile(r"(?:^|;\s*)(?:if|case)\b"), re.compile(r"(?:^|;\s*)(?:fi|esac)\b")
_NO_PROGRAM = re.compile(r"(?:if|elif|for|while|echo|printf|mkdir|cp|rm|cat|sed|\[)\b|\[")  # beginning of a command
_REDIRECTION = re.compile(r"\d?>|&>|\||&|;")
_ARITHMETIC = re.compile(r"\$\(\(([\d\s+*/%-]{1,200})\)\)")
# parts of the names of Megatron-LM's programs that train other models than GPT, or generate
_OTHER_MODELS = re.compile(r"(?:^|_)(?:bert|t5|ict|retro|vision|vlm|mimo|mamba|hybrid|mlm|generate|generation|"
                           r"evaluate)(?=[_.])")


def script_words(file: str, text: str, notes: list[str]) -> list[str]:
    """Return the words of the command that starts the program, with the script's own variables filled in.

    Without such a command: the words of all commands, or of variables such as GPT_ARGS. Conditions are not evaluated;
    `notes` gets what they decide.
    """
    variables: dict[str, str] = {}
    commands: list[str] = []
    conditional: dict[str, str] = {}
    depth = 0  # of conditions
    for line in _logical_lines(text):
        depth += len(_IF.findall(line)) - len(_FI.findall(line))
        found = _ASSIGNMENT.fullmatch(line)
        if found and not line.startswith("-"):
            value = found[2].strip()
            value = value[1:-1] if value[:1] == "(" and value[-1:] == ")" else value
            previous = f"{variables.get(found[1], '')} " if f"{found[1]}+=" in line else ""
            value = _computed(previous + _fill(_unquoted(value), variables))
            if "$(" not in value and "`" not in value:  # the output of a command remains a variable
                variables[found[1]] = value
            if depth > 0:
                conditional[line] = value
        elif not _NO_PROGRAM.match(line):
            commands.append(_computed(_fill(line, variables)))
    commands = [command for command in commands if ".py" in command] or commands
    if sum(".py" in command for command in commands) > 1:
        raise ConfigError(file, problem="it starts several programs", remedy="keep the command of one of them")
    used = " ".join(commands)
    notes += [f"the script has `{shorten(line, 100)}` under a condition, which is taken as true"
              for line, value in conditional.items() if value and value in used]
    words = [word for command in commands for word in _until_redirection(_split(file, command))]
    if not any(_FLAG.match(word) for word in words):  # a fragment that only sets variables such as GPT_ARGS
        values = [value for value in variables.values() if value.lstrip().startswith("--")]
        words = [word for value in values for word in _split(file, value)]
    # a quoted flag with its value, in an array that is expanded without quotes, and sh -c "COMMAND"
    return [part for word in words for part in (word.split() if word.startswith("--") or ".py " in word else [word])]


def _until_redirection(words: list[str]) -> list[str]:
    """Return the words of the first command of a line."""
    return words[:next((index for index, word in enumerate(words) if _REDIRECTION.match(word)), len(words))]


def _computed(text: str) -> str:
    """Replace $((3 * 10 / 2)), without inner parentheses, by its value: / is a division of whole numbers."""
    def value(found: re.Match[str]) -> str:
        inner = found[1]
        for signs in ("*/%", "+-"):
            pattern = re.compile(rf"(\d+)\s*([{signs}])\s*(\d+)")
            while part := pattern.search(inner):
                left, sign, right = int(part[1]), part[2], int(part[3])
                if not right and sign in "/%":
                    return found[0]
                results = {"*": left * right, "/": left // (right or 1), "%": left % (right or 1),
                           "+": left + right, "-": left - right}
                inner = f"{inner[:part.start()]}{results[sign]}{inner[part.end():]}"
        return inner.strip()
    return _ARITHMETIC.sub(value, text)


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text.count(text[0]) == 2
    return text[1:-1] if is_quoted else text


def _logical_lines(text: str) -> Iterator[str]:
    """Yield the commands of a script: lines joined at a backslash, inside quotes and inside ( ), without comments."""
    pending = ""
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        pending = f"{pending} {bare}".strip() if pending else bare
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        opened = re.match(r"[A-Za-z_]\w*\+?=\(", pending) and not pending.rstrip().endswith(")")
        if pending.count('"') % 2 or opened:
            continue
        if pending:
            yield pending
        pending = ""
    if pending:
        yield pending


def _fill(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables that the script has set; others remain."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[3] or found[0]), text)


def _split(file: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(file, problem=f"{shorten(text, 60)!r} is not a list of words: {error}") from None


def command_flags(place: str, words: list[str], launcher: dict[str, Any], notes: list[str]) -> list[tuple[str, Any]]:
    """Return the flags behind the program's name, with their values.

    `launcher` gets those before it, which belong to the program's launcher, and `notes` what remains open. Raises
    ConfigError for a program that trains another kind of model.
    """
    bare = [bool(_VARIABLE.fullmatch(word)) for word in words]
    # a variable behind a value, or behind another one, stands for further arguments
    further = [is_bare and index > 0 and not _FLAG.match(words[index - 1]) for index, is_bare in enumerate(bare)]
    notes += [f"the script adds {word}, which it does not set: give these arguments too"
              for word, is_further in zip(words, further, strict=True) if is_further and word[1:] != "@"]
    words = [word for word, is_further in zip(words, further, strict=True) if not is_further]
    programs = [index for index, word in enumerate(words) if word.endswith(".py")]
    if programs:
        if _OTHER_MODELS.search(program := Path(words[programs[0]]).name):
            raise ConfigError(place, problem=f"{program} trains no GPT-style model on text",
                              remedy="settings of pretrain_gpt.py or run_clm.py can be translated")
        launcher.update({flag.lstrip("-").replace("-", "_"): value for flag, value in _flags(words[:programs[0]])})
        words = words[programs[0] + 1:]
    return [*_flags(words)]


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each flag with its value: true without one, a list of several."""
    flag, values = "", list[str]()
    for word in [*words, "--end"]:
        if not _FLAG.match(word) or word.lstrip("-")[:1].isdigit():
            values.append(word)
            continue
        if flag:
            yield flag, True if not values else values[0] if len(values) == 1 else values
        flag, _, rest = word.partition("=")
        values = [rest] if rest else []
