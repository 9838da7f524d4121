"""Read command lines of other programs, and the shell scripts that contain them."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.translate.settings import WrittenFile
from pretrain.extensions.translate.shell import Command, Script

_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?:\[[@*]\])?(?::-([^}]*))?\}")
_FLAG = re.compile(r"--?[A-Za-z]")
_FLAG_WITH_VALUE = re.compile(r"--[\w-]+\s")
_SCRIPT = re.compile(r"(?:(?:bash|sh|sbatch|srun)\s.*)?\S+\.(?:sh|slurm|sbatch)(?!\S)")
_TRAINING = re.compile(r"(?:pretrain|finetune|train|run)_?\w*\.py(?!\S)")
# parts of the names of programs of Megatron-LM and its forks that train other models than GPT, on pairs of inputs and
# targets (t0), or generate
_OTHER_MODELS = re.compile(r"(?:^|_)(?:bert|t5|t0|prefix|ict|retro|vision|vlm|mimo|mamba|hybrid|mlm|generate|"
                           r"generation|evaluate)(?=[_.])")


def script_words(file: str, text: str, notes: list[str], written: dict[str, WrittenFile]) -> list[str]:
    """Return the words of the command that starts the program, with the script's own variables filled in.

    Without such a command: the words of another one, or of variables such as GPT_ARGS. `notes` gets the lines that
    were not understood, and `written` the files that the script writes.
    """
    script = Script(file)
    try:
        script.follow(text)
    except RecursionError:
        raise ConfigError(file, problem="it is nested too deeply for a script of settings") from None
    written |= {path: WrittenFile(content, _lines(file, script.unclear[path]))
                for path, content in script.written.items()}
    found = _program_of(file, script)
    words, unclear = (found.words, found.unclear) if found else ([], {})
    if not any(_FLAG.match(word) for word in words):  # a fragment that only sets variables such as GPT_ARGS
        lists = {name: [value] if isinstance(value, str) else value for name, value in script.variables.items()}
        chosen = [name for name, values in lists.items() if values and values[0].lstrip().startswith("--")]
        words = [word for name in chosen for value in lists[name] for word in _split(file, value)]
        unclear = {line: how for name in chosen for line, how in script.unclear[name].items()}
    if not words:
        others = [each for each in script.commands if _SCRIPT.match(" ".join(each.words))]
        raise ConfigError(file, problem="it starts no program with arguments" + "".join(
            f"; line {each.line} starts another script: {shorten(' '.join(each.words), 80)}" for each in others[:1]),
            remedy="give the script that has the arguments")
    after = next((index for index, word in enumerate(words) if word.endswith(".py")), -1) + 1
    for name in re.findall(r"\$\{?(\w+)", " ".join(words[after:])):
        unclear |= script.outputs.get(name, {})
    notes += _lines(file, unclear)
    # a quoted flag with its value, in an array that is expanded without quotes
    return [part for word in words for part in (word.split() if _FLAG_WITH_VALUE.match(word) else [word])]


def _program_of(file: str, script: Script) -> Command | None:
    """Return the command that starts the training program, or else one with flags. Raises ConfigError for several."""
    programs = [each for each in script.commands if any(word.endswith(".py") for word in each.words)]
    training = [each for each in programs if _TRAINING.search(" ".join(each.words))] or programs
    if len({tuple(each.words) for each in training}) > 1:
        lines = ", ".join(str(each.line) for each in training)
        raise ConfigError(file, problem=f"it starts several programs, on the lines {lines}",
                          remedy="keep the command of one of them")
    others = [each for each in script.commands if any(_FLAG.match(word) for word in each.words)
              and not _SCRIPT.match(" ".join(each.words))]
    return next(iter(training or others), None)


def _lines(file: str, unclear: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(f"{Path(file).name}: line {line} was not understood: {shorten(' '.join(how.split()), 100)}"
                 for line, how in sorted(unclear.items()))


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
