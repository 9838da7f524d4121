"""The three files as text, and the table of what became of each setting."""

import json
import shlex
from typing import Any

import yaml

from pretrain.commands.translate.parts import PLACEHOLDER
from pretrain.commands.translate.result import BECAME, DIFFERS, NONE, Result
from pretrain.commands.translate.settings import Settings
from pretrain.config.flags.arguments import FLAGS

_HEADINGS = {BECAME: "became", DIFFERS: "became, with another meaning", NONE: "no counterpart"}
_ORDER = (DIFFERS, NONE, BECAME)


def yaml_text(settings: Settings, result: Result, folder: str) -> str:
    """Return run.yaml: what remains to do as comments, then each flag in the order of --help."""
    head = [f"# Translated from {settings.program_name} by `ds-pretrain translate`. Validate it with:",
            f"# {check_command(result, folder)}", *(f"# TO DO: {line}" for line in result.remaining)]
    values = {name: result.run[name] for name in FLAGS if name in result.run}
    lines = [_line(name, value) for name, value in values.items()]
    return "\n".join(head) + "\n\n" + "".join(lines)


def _line(name: str, value: Any) -> str:
    mark = "  # TO DO" if str(value).startswith(PLACEHOLDER) else ""
    text = yaml.safe_dump(value, width=2**20, allow_unicode=True, default_flow_style=True)
    return f"{name}: {text.removesuffix(chr(10)).removesuffix(f'{chr(10)}...')}{mark}\n"


def json_text(values: Any) -> str:
    """Return a JSON file."""
    return json.dumps(values, indent=2) + "\n"


def check_command(result: Result, folder: str) -> str:
    """Return the command that validates the run."""
    return f"ds-pretrain check --config {shlex.quote(f'{folder}/run.yaml')} --world_size N"


def table_lines(settings: Settings, result: Result) -> list[str]:
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
