"""The flags that name a dataset instead of inputs: --dataset, --dataset_config, --dataset_split, --dataset_revision."""

import argparse

from pretrain.cli import Parser, path_text, text
from pretrain.data.text_inputs.hub_dataset import DatasetName
from pretrain.errors import ConfigError
from pretrain.remote import path_or_url, without_credentials

_INPUT_HELP = ("text, JSON lines or Parquet, also compressed (.gz, .zst): a file, a folder, a glob in quotes, or - for "
               "standard input. A URL such as s3://bucket/folder, gs://bucket/*.jsonl, https://host/file or "
               "hf://datasets/org/name/*.parquet is one of these in a store; its credentials come from the "
               "environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, ~/.netrc, HF_TOKEN)")
_OPTIONS = ("dataset_config", "dataset_split", "dataset_revision")
_ONLY_OF_FILES = ("format", "document_separator")


def add_input_flags(parser: Parser) -> None:
    """Add INPUT and the flags of a dataset."""
    parser.add_argument("inputs", metavar="INPUT", nargs="*", type=path_or_url, help=_INPUT_HELP)
    parser.add_argument("--dataset", type=path_text,
                        help="instead of INPUT, read a dataset of the Hugging Face Hub (ORG/NAME), or a folder with "
                        "the files of one; its rows are streamed, and --jsonl_key names the column")
    parser.add_argument("--dataset_config", type=text, help="config of the dataset (default: its default one)")
    parser.add_argument("--dataset_split", type=text, help="split of the dataset (default: train)")
    parser.add_argument("--dataset_revision", type=text,
                        help="branch, tag or commit of the dataset (default: main); the commit is recorded")


def named_inputs(args: argparse.Namespace) -> list[str] | DatasetName:
    """Return the inputs, or the dataset. Raises ConfigError if there are both or none, and for flags without effect."""
    inputs: list[str] = args.inputs
    if args.dataset is None:
        given = next((name for name in _OPTIONS if getattr(args, name) is not None), None)
        if given is not None:
            raise ConfigError(f"--{given}", problem="it has no effect without --dataset", remedy="leave it out")
        if not inputs:
            raise ConfigError("INPUT", problem="neither an input nor --dataset is given", remedy="name files, or a "
                              "dataset")
        return inputs
    if inputs:
        given = without_credentials(" ".join(inputs))
        raise ConfigError("--dataset", problem=f"inputs are given too: {given}", remedy="leave out one of both")
    for name in _ONLY_OF_FILES:
        if getattr(args, name, None) not in (None, "auto"):
            raise ConfigError(f"--{name}", problem="it has no effect with --dataset", remedy="leave it out")
    return DatasetName(args.dataset, args.dataset_config or "", args.dataset_split or "train",
                       args.dataset_revision or "")


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the words of the command line that name the inputs."""
    words = [*map(without_credentials, args.inputs)]
    for name in ("dataset", *_OPTIONS):
        if getattr(args, name) is not None:
            words += [f"--{name}", getattr(args, name)]
    return words
