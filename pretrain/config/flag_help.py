"""The text of `pretrain/train.py --help`: all flags in groups, each with its default."""

import argparse
import dataclasses
from typing import Any

USAGE = """pretrain/train.py --deepspeed_config FILE --model NAME
           --train_data PREFIX --train_steps N --save RUN [flags]
       pretrain/train.py --config run.yaml [flags]"""
DESCRIPTION = ("Pretrain a GPT-style model. Every flag is also a key of the YAML file that --config names; flags on "
               "the command line win. --seq-length is --seq_length.")
# first flag of a group -> its title
GROUPS = {
    "deepspeed_config": "model and run folder",
    "train_data": "data",
    "train_steps": "length and schedule",
    "log_interval": "evaluation and logging",
    "save_interval": "checkpoints",
    "micro_batch_size": 'values for "auto"',
    "compile_blocks": "speed and debugging",
}
_DESCRIPTIONS = {
    'values for "auto"': 'Each fills a key that the DeepSpeed JSON leaves out or at "auto", and is rejected where the '
                         'JSON has another value. The default is that of "auto".',
}
_METAVARS = {int: "N", float: "X", str: "TEXT"}


def help_text(arguments: type) -> str:
    """The page for the fields of RunArguments, as wide as the terminal."""
    parser = argparse.ArgumentParser(usage=USAGE, description=DESCRIPTION, add_help=False, allow_abbrev=False,
                                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28))
    group = parser.add_argument_group("help")
    group.add_argument("--help", "-h", action="store_true", help="show this page")
    for field in dataclasses.fields(arguments):
        if field.name in GROUPS:
            title = GROUPS[field.name]
            group = parser.add_argument_group(title, _DESCRIPTIONS.get(title))
        if field.name == "deepspeed_config":
            group.add_argument("--config", metavar="FILE", help="YAML file with these flags as keys (default: none)")
        words: dict[str, Any] = {"action": "store_true"} if field.default is False else {
            "metavar": field.metadata.get("metavar") or _METAVARS[_kind(field)]}
        group.add_argument(f"--{field.name}", help=field.metadata["help"], **words)
    return parser.format_help()


def _kind(field: "dataclasses.Field[Any]") -> type:
    """The type of the flag's value: int for `int | None`."""
    return next(kind for kind in _METAVARS if kind in (field.type, *getattr(field.type, "__args__", ())))
