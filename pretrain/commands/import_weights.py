"""Weights in: `ds-pretrain import` makes a transformers folder a checkpoint."""

import os
from pathlib import Path

from pretrain.checkpoint.convert.new_folder import check_new_weights, output_summary
from pretrain.checkpoint.format.run_checkpoints import step_of
from pretrain.checkpoint.load.hf_folder import check_hf_folder, find_hf_tokenizer
from pretrain.cli import Parser, path
from pretrain.errors import one_line
from pretrain.hub import find_repository, is_repository, snapshot_in

SOURCE = "a transformers folder, a folder models--ORG--NAME of the Hub's cache, or the name of a repository, org/name"
OUTPUT = ("new run folder, with the weights in OUT/checkpoints/global_step0 and the tokenizer in OUT/tokenizer; if "
          "OUT's own name is global_step0, only this checkpoint is written")


def main() -> None:
    parser = Parser(description="Import weights of transformers as a checkpoint.")
    parser.add_argument("source", type=path, metavar="SOURCE", help=SOURCE)
    parser.add_argument("--output", required=True, type=path, metavar="OUT", help=OUTPUT)
    args = parser.parse_args()
    import_weights(args.source, args.output)


def import_weights(source: Path, out: Path) -> None:
    """Write the weights of a folder or repository as a checkpoint, and print what was written. Raises ConfigError."""
    check_new_weights(out, "imported")
    # report wrong files before torch is imported, which takes seconds
    name = str(source)
    folder = find_repository(name, flag="SOURCE", want="weights") if is_repository(name) else snapshot_in(source)
    found = check_hf_folder(folder)
    tokenizer = find_hf_tokenizer(found)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    from pretrain.checkpoint.convert.write_weights import import_hf

    import_hf(found, out, tokenizer)
    print(output_summary(out))
    print(f"{found.config.parameters_text()}, {found.dtype}, architecture {found.config.architecture}")
    for note in tokenizer.notes if tokenizer else ():
        print(f"note: {one_line(note)}")
    if tokenizer is None:
        print("no tokenizer: the folder has neither tokenizer.model nor tokenizer.json")
    elif step_of(out) == 0:
        print("the tokenizer is not copied, because the output is a single checkpoint")
