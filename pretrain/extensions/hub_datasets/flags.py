"""The flags that name a dataset instead of inputs: --dataset, --dataset_config, --dataset_split, --dataset_revision."""

import argparse
from typing import TYPE_CHECKING

from pretrain.cli import Parser, path_text, text
from pretrain.errors import ConfigError
from pretrain.remote import without_credentials

if TYPE_CHECKING:
    from pretrain.extensions.hub_datasets.hub_dataset import DatasetName

_OPTIONS = ("dataset_config", "dataset_split", "dataset_revision")
_ONLY_OF_FILES = ("format", "document_separator")


def add_flags(parser: Parser) -> None:
    """Add the flags of a dataset."""
    parser.add_argument("--dataset", type=path_text,
                        help="instead of INPUT, read a dataset of the Hugging Face Hub (ORG/NAME), or a folder with "
                        "the files of one; its rows are streamed, and --jsonl_key names the column")
    parser.add_argument("--dataset_config", type=text, help="config of the dataset (default: its default one)")
    parser.add_argument("--dataset_split", type=text, help="split of the dataset (default: train)")
    parser.add_argument("--dataset_revision", type=text,
                        help="branch, tag or commit of the dataset (default: main); the commit is recorded")


def named_dataset(args: argparse.Namespace) -> "DatasetName | None":
    """Return the dataset; None without --dataset. Raises ConfigError for inputs besides it, flags without effect."""
    if args.dataset is None:
        given = next((name for name in _OPTIONS if getattr(args, name) is not None), None)
        if given is not None:
            raise ConfigError(f"--{given}", problem="it has no effect without --dataset", remedy="leave it out")
        return None
    if args.inputs:
        given = without_credentials(" ".join(args.inputs))
        raise ConfigError("--dataset", problem=f"inputs are given too: {given}", remedy="leave out one of both")
    for name in _ONLY_OF_FILES:
        if getattr(args, name, None) not in (None, "auto"):
            raise ConfigError(f"--{name}", problem="it has no effect with --dataset", remedy="leave it out")
    from pretrain.extensions.hub_datasets.hub_dataset import DatasetName

    return DatasetName(args.dataset, args.dataset_config or "", args.dataset_split or "train",
                       args.dataset_revision or "")
