"""Wrong values for every flag of every program, and for every path that is read or written."""

import argparse
from collections.abc import Iterator

from pretrain.cli import Number
from pretrain.config.flags.arguments import FLAGS, TYPES
from pretrain.config.flags.flag import tokens
from tests.wrong_inputs.case import NUMBERS, TOOLS, Case, actions_of, main_of
from tests.wrong_inputs.paths import LONG


def flag_cases() -> Iterator[Case]:
    """Yield every flag of every program with no value, an empty value, wrong types, and numbers out of range."""
    for program, right in TOOLS.items():
        for number, action in enumerate(actions_of(program, main_of(program))):
            flag = next(word for word in action.option_strings if word.startswith("--"))
            if program == "pretrain/train.py" and flag != f"--{action.dest}":
                continue  # the second name of a flag
            for value in _wrong_values(program, action, number):
                yield Case(f"{program} {flag}={value[:20]}", program, _before_end(right, [f"{flag}={value}"]), flag)
            if action.nargs not in (0, "?"):
                words = ["--save", "{world}/run", flag, "--", "true"] if "--" in right else [*right, flag]
                yield Case(f"{program} {flag} (no value)", program, tuple(words), flag)
        yield Case(f"{program} --no_such_flag", program, _before_end(right, ["--no_such_flag=1"]), "--no_such_flag")
        yield Case(f"{program} --no_such_flag=LONG", program, _before_end(right, [f"--{LONG}"]), "--nnn")
    yield from _yaml_cases()


def _wrong_values(program: str, action: argparse.Action, number: int) -> Iterator[str]:
    """Yield values that the declaration of a flag rejects: of a number those at its limits, and some of NUMBERS."""
    if action.nargs == 0:
        yield from ("x", "")  # --json=x
    elif action.const is True:
        yield from ("maybe", "2")
    elif action.choices is not None:
        yield from ("no-such-choice", "", "5.5")
    elif isinstance(action.type, Number) or action.type in (int, float, tokens):
        declared = FLAGS[action.dest] if program == "pretrain/train.py" else action.type
        limits = [value for value in (declared.low, declared.high) if value is not None and abs(value) < 1e20]
        words = [*NUMBERS[number % 3::3], *(str(value + step) for value in limits for step in (-1, 1))]
        yield from (word for word in dict.fromkeys(words) if not _accepts(program, action, word))
    else:
        is_any_text = action.dest == "note" or (action.dest in FLAGS and FLAGS[action.dest].is_secret)
        yield from ("",) if is_any_text else ("", "~/x")


def _accepts(program: str, action: argparse.Action, word: str) -> bool:
    try:
        value = action.type(word)  # type: ignore[operator]
        if program == "pretrain/train.py":
            FLAGS[action.dest].check(action.dest, value)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def _yaml_cases() -> Iterator[Case]:
    """Yield each key of the YAML file with a value of another shape, and twice."""
    program = "pretrain/train.py"
    for name, kind in TYPES.items():
        nested = "[[1]]" if "list" in str(kind) else "[1]"
        for what, text, culprit in (("list", nested, name), ("mapping", "{a: 1}", name),
                                    ("twice", f"1\n\n{name}: 1", f"in.yaml:3: {name}")):
            if (name, what) == ("model_overrides", "mapping"):
                continue  # it is one
            yield Case(f"yaml {name}: {what}", program, ("--config", "{world}/in.yaml"), culprit,
                       (("in.yaml", f"{name}: {text}\n".encode()),))


def _before_end(right: list[str], words: list[str]) -> tuple[str, ...]:
    """Insert `words` at the end of a valid command line, or before the "--" in front of a supervised command."""
    end = right.index("--") if "--" in right else len(right)
    return (*right[:end], *words, *right[end:])
