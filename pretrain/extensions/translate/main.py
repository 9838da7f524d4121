"""Translate the settings of another training program into run.yaml, ds_config.json and config.json.

    ds-pretrain translate pythia-70m.yml --output runs/pythia-70m
    ds-pretrain translate --output runs/gpt -- --num-layers 24 --hidden-size 1024 ...
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import Parser, path_text, whole_number
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.other_programs import (
    MATTERS,
    NO_EFFECT,
    hint_for,
    without_counterpart,
)
from pretrain.config.write_yaml import comment_line, yaml_entry
from pretrain.errors import ConfigError, listed, one_line
from pretrain.extensions.translate.deepspeed_json import flat_names
from pretrain.extensions.translate.gpt_neox import translate_neox
from pretrain.extensions.translate.megatron import translate_megatron
from pretrain.extensions.translate.parts import BECAME, DIFFERS, JSON, MODEL, NONE, PLACEHOLDER, RUN, Result
from pretrain.extensions.translate.read_input import read_settings
from pretrain.extensions.translate.settings import (
    OFF,
    PROGRAMS,
    Settings,
    difference_of,
    is_known,
    known_names,
    reason_if_unused,
    refusal_of,
)
from pretrain.extensions.translate.torchtitan import translate_torchtitan
from pretrain.extensions.translate.trainer import translate_trainer
from pretrain.model.config import model_config_from
from pretrain.monitor.repeatable import NEVER_REPEATED
from pretrain.paths import check_folder
from pretrain.terminal import print_rows

_HEADINGS = {BECAME: "became", DIFFERS: "became, with another meaning", NONE: "no counterpart"}
_ORDER = (DIFFERS, NONE, BECAME)
_MOST = 10**15


def write_files(settings: Settings, result: Result, output: str, *, overwrite: bool) -> None:
    """Write the files into the folder `output`. Raises ConfigError if one exists, unless `overwrite`."""
    folder = Path(output)
    result.run["deepspeed_config"] = str(folder / JSON)
    if result.model:
        result.run["model"] = str(folder / MODEL)
    if not result.run.get("save"):
        result.run["save"] = str(folder / "run")
    contents = {RUN: _yaml_text(settings, result, output), JSON: _json_text(result.json)}
    if result.model:
        contents[MODEL] = _json_text(result.model)
    check_folder(folder, "--output")
    for name in contents:
        if (folder / name).exists() and not overwrite:
            raise ConfigError("--output", problem=f"{folder / name} exists", remedy="--overwrite replaces it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise ConfigError("--output", problem=f"{folder} cannot be written ({error.strerror})") from None


def report(settings: Settings, result: Result, folder: str) -> list[str]:
    """Return the lines to print: the table, the files, and what remains to do."""
    files = [RUN, JSON, *([MODEL] if result.model else [])]
    model = model_config_from(result.model, MODEL, result.run.get("model_overrides")) if result.model else None
    lines = [f"{settings.program_name}: {len(settings.given)} settings", *_table_lines(settings, result), "",
             f"wrote {', '.join(f'{folder}/{name}' for name in files)}"]
    if model is not None:
        lines.append(f"model: {model.architecture}, {model.num_parameters():,} parameters")
    lines += [f"remains to do: {line}" for line in result.remaining]
    return [one_line(line) for line in (*lines, f"next: {_check_command(result, folder)}")]


def _yaml_text(settings: Settings, result: Result, folder: str) -> str:
    """Return run.yaml: what remains to do as comments, then each flag in the order of --help."""
    head = [f"Translated from {settings.program_name} by `ds-pretrain translate`. Validate it with:",
            _check_command(result, folder), *(f"TO DO: {line}" for line in result.remaining)]
    values = {name: result.run[name] for name in FLAGS if name in result.run}
    lines = [yaml_entry(name, value, lists_on_one_line=True,
                        remark="TO DO" if str(value).startswith(PLACEHOLDER) else "") for name, value in values.items()]
    return "".join([*map(comment_line, head), "\n", *lines])


def _json_text(values: Any) -> str:
    """Return a JSON file."""
    return json.dumps(values, indent=2) + "\n"


def _check_command(result: Result, folder: str) -> str:
    """Return the command that validates the run."""
    return f"ds-pretrain check --config {shlex.quote(f'{folder}/run.yaml')} --world_size N"


def _table_lines(settings: Settings, result: Result) -> list[str]:
    """Return the table: the settings by outcome, and what became of them."""
    width = min(max((len(name) for name in result.rows), default=0), 44)
    lines: list[str] = []
    for outcome in _ORDER:
        rows = {name: row for name, row in result.rows.items() if row.outcome == outcome}
        if rows:
            lines += ["", f"{_HEADINGS[outcome]}:"]
            lines += [f"  {name:<{width}}  {_value(settings, name)}{row.text}" for name, row in rows.items()]
    return lines


def _value(settings: Settings, name: str) -> str:
    """Return a short value of a setting, with an arrow."""
    value = settings.given.get(name)
    if value is None or isinstance(value, (dict, list)):
        return "-> "
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{text if len(text) <= 40 else f'{text[:37]}...'} -> "


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
    """Complete the rows: each setting of the input gets one."""
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


def main(argv: list[str] | None = None) -> None:
    """Write the files, and print the table. Raises ConfigError."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, others = _divided(words)
    flags = _parser().parse_args(own)
    settings = read_settings(flags.files, others, flags.program)
    result = translate(settings, vocab_size=flags.vocab_size, dataset_tokens=flags.dataset_tokens)
    write_files(settings, result, flags.output, overwrite=flags.overwrite)
    *rows, following = report(settings, result, flags.output)
    print_rows(rows, indent=6)
    print(following)


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first --."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1:]


def _parser() -> Parser:
    parser = Parser(usage="ds-pretrain translate [FILE ...] --output FOLDER [flags] [-- WORDS]", description=(
        "Translate settings of GPT-NeoX (YAML), Megatron-LM and Megatron-DeepSpeed (arguments), transformers.Trainer "
        "(a command line or TrainingArguments as JSON or YAML) or torchtitan (TOML) into run.yaml, ds_config.json and "
        "config.json, and list what became of each setting. WORDS are a command line of the other program."))
    parser.add_argument("files", nargs="*", type=path_text, metavar="FILE",
                        help="YAML, TOML or JSON of the other program, or a shell script with its command line")
    parser.add_argument("--output", type=path_text, required=True, metavar="FOLDER", help="folder to write into")
    parser.add_argument("--from", dest="program", choices=tuple(PROGRAMS),
                        help="the other program (default: recognized by its settings)")
    parser.add_argument("--vocab_size", type=whole_number(1, 2**24), metavar="N",
                        help="tokens of the tokenizer, before padding, where the input does not say it")
    parser.add_argument("--dataset_tokens", type=whole_number(1, _MOST), metavar="N",
                        help="tokens of the training data, for a length in epochs")
    parser.add_argument("--overwrite", action="store_true", help="replace the files in FOLDER")
    return parser


def translate(settings: Settings, *, vocab_size: int | None = None, dataset_tokens: int | None = None) -> Result:
    """Return the translation. Raises ConfigError for unknown settings, and for models that nothing here computes."""
    check_names(settings)
    result = Result()
    if settings.program == "neox":
        translate_neox(settings, result, vocab_size=vocab_size)
    elif settings.program == "megatron":
        translate_megatron(settings, result, vocab_size=vocab_size)
    elif settings.program == "trainer":
        translate_trainer(settings, result, dataset_tokens=dataset_tokens)
    else:
        translate_torchtitan(settings, result)
    complete_rows(settings, result)
    if result.model:
        model_config_from(result.model, MODEL, result.run.get("model_overrides"))
    return result
