"""A verdict for each setting of the input: what no part of the translation has used gets it from the tables."""

from typing import Any

from pretrain.config.flags.arguments import FLAGS
from pretrain.config.other_programs import (
    MATTERS,
    NO_EFFECT,
    hint_for,
    without_counterpart,
)
from pretrain.errors import ConfigError, listed
from pretrain.extensions.translate.deepspeed_json import flat_names
from pretrain.extensions.translate.result import Result
from pretrain.extensions.translate.settings import OFF, Settings
from pretrain.extensions.translate.tables import difference_of, is_known, known_names, reason_if_unused, refusal_of
from pretrain.monitor.repeatable import NEVER_REPEATED


def check_names(settings: Settings) -> None:
    """Raise ConfigError for a setting that the tables do not know, with the closest name, and for refused ones."""
    flags = FLAGS.keys() - NEVER_REPEATED.keys()
    unknown = [name for name in settings.given if name not in flags and not is_known(name)]
    for name, value in settings.given.items():
        if reason := _refusal(name, value):
            raise ConfigError(settings.where(name), problem=f"nothing here computes this: {reason}",
                              remedy="turn it off in the input if the model does not need it")
    if unknown:
        name, others = unknown[0], f", nor by {listed(unknown[1:])}" if unknown[1:] else ""
        raise ConfigError(settings.where(name), problem=f"{settings.program_name} has no setting that is known here by "
                          f"this name{others}", remedy="remove what is none",
                          word="" if others else name.replace("-", "_"), known=known_names())


def _refusal(name: str, value: Any) -> str:
    found = refusal_of(name)
    if found is None or value in OFF or str(value).lower() == found[1].lower() != "":
        return ""
    return found[0]


def complete_rows(settings: Settings, result: Result) -> None:
    """Give a verdict to each setting of the input that has none yet."""
    _note_differences(settings, result)
    _note_variables(result)
    for name, value in settings.given.items():
        nested = [row for row in result.rows if row.startswith(f"{name}.")]
        if name in result.rows or (nested and isinstance(value, dict)):
            continue
        unused = reason_if_unused(settings.program, name) if value is not None else ""
        result.none(unused or _reason(name, value), name)
    result.remaining += settings.notes
    for name in settings.launcher:
        result.none("a flag of the launcher: `ds-pretrain --help` lists those of this one", f"launcher: {name}")
    for name in list(result.rows):
        if name not in settings.given and not _is_part(name, settings) and not name.startswith("launcher: "):
            result.rows[name].texts.insert(0, "not given")


def _note_differences(settings: Settings, result: Result) -> None:
    """Add to each setting that became something how its meaning differs."""
    for name, value in settings.given.items():
        how = difference_of(name)
        if how and name in result.rows and value not in OFF:
            result.differs(how, name)


def _note_variables(result: Result) -> None:
    """List the values in which a variable of a script remains, that the script does not set."""
    for name, value in result.run.items():
        if "$" in str(value):
            result.remaining.append(f"--{name}: {value} has a variable that the script does not set")


def _is_part(name: str, settings: Settings) -> bool:
    """Return whether a row is about a key inside a block, or inside the JSON, of the input."""
    return any(name in flat_names({key: value}) for key, value in settings.given.items()) or ": " in name


def _reason(name: str, value: Any) -> str:
    """Return why a setting has no counterpart, and whether this matters."""
    for table in (MATTERS, NO_EFFECT):
        found = without_counterpart(table, name)
        if found is None:
            continue
        reason, neutral = found
        if value in OFF or str(value).lower() == neutral.lower() != "":
            return "off, as here" if value in OFF else "as here"
        return f"MATTERS: {reason}" if table == MATTERS else f"no effect on the result: {reason}"
    if refusal_of(name) is not None:  # see check_names
        return "off, as here" if value in OFF else "as here"
    if value in OFF:
        return "off"
    hint = hint_for(name) or "a flag has this name"
    if ": " in hint.partition("--")[2]:  # a hint that says what happens here
        return hint
    is_here = hint.startswith(("here it is", "write ", "it is a key", "it belongs", "a flag has"))
    return f"CHECK: not taken over; {hint}" if is_here else hint
