"""Text of `pretrain/train.py --help`: all flags in groups, each with its default."""

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

USAGE = """pretrain/train.py --deepspeed_config FILE --model NAME
           --train_data PREFIX --train_steps N --save RUN [flags]
       pretrain/train.py --config run.yaml [flags]"""
DESCRIPTION = ("Pretrain a GPT-style model. Every flag is also a key of the YAML file that --config names; flags on "
               "the command line win. --seq-length is --seq_length.")
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def help_text(groups: Iterable[Any]) -> str:
    """Format the help for dataclasses with a `title` and, optionally, a `description`, as wide as the terminal."""
    parser = argparse.ArgumentParser(usage=USAGE, description=DESCRIPTION, add_help=False, allow_abbrev=False,
                                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28))
    section = parser.add_argument_group("help")
    section.add_argument("--help", "-h", action="store_true", help="show this page")
    for group in groups:
        section = parser.add_argument_group(group.title, getattr(group, "description", None))
        for field in dataclasses.fields(group):
            if field.name == "deepspeed_config":
                section.add_argument("--config", metavar="FILE",
                                     help="YAML file with these flags as keys (default: none)")
            options: dict[str, Any] = {"action": "store_true"} if field.default is False else {
                "metavar": field.metadata.get("metavar") or _METAVARS[_value_type(field)]}
            if is_list(field):
                options["nargs"] = "+"
            section.add_argument(f"--{field.name}", help=field.metadata["help"], **options)
    return parser.format_help()


def is_list(field: "dataclasses.Field[Any]") -> bool:
    """Return whether the flag takes several words."""
    return list[str] in getattr(field.type, "__args__", ())


def _value_type(field: "dataclasses.Field[Any]") -> type:
    """Return the type of the flag's value: int for `int | None`."""
    return next(kind for kind in _METAVARS if kind in (field.type, *getattr(field.type, "__args__", ())))
