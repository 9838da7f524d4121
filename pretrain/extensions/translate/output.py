"""Write the three files, and the table of what became of each setting."""

import json
import shlex
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.config.flags.arguments import FLAGS
from pretrain.config.write_yaml import comment_line, yaml_entry
from pretrain.errors import ConfigError, one_line
from pretrain.extensions.translate.parts import PLACEHOLDER
from pretrain.extensions.translate.result import BECAME, DIFFERS, JSON, MODEL, NONE, RUN, Result
from pretrain.extensions.translate.settings import Settings
from pretrain.model.config import model_config_from
from pretrain.paths import check_folder

_HEADINGS = {BECAME: "became", DIFFERS: "became, with another meaning", NONE: "no counterpart"}
_ORDER = (DIFFERS, NONE, BECAME)


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
    """Return the table: for each verdict the settings, and what became of them."""
    width = min(max((len(name) for name in result.rows), default=0), 44)
    lines: list[str] = []
    for verdict in _ORDER:
        rows = {name: row for name, row in result.rows.items() if row.verdict == verdict}
        if rows:
            lines += ["", f"{_HEADINGS[verdict]}:"]
            lines += [f"  {name:<{width}}  {_value(settings, name)}{row.text}" for name, row in rows.items()]
    return lines


def _value(settings: Settings, name: str) -> str:
    """Return a short value of a setting, with an arrow."""
    value = settings.given.get(name)
    if value is None or isinstance(value, (dict, list)):
        return "-> "
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{text if len(text) <= 40 else f'{text[:37]}...'} -> "
