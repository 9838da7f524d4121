#!/usr/bin/env python3
"""Import the weights of a transformers folder as a checkpoint that any layout can train."""

import os

from pretrain.checkpoint.convert.new_folder import check_new_weights, output_summary
from pretrain.checkpoint.format.manifest import step_of
from pretrain.checkpoint.load.hf_folder import check_hf_folder, find_hf_tokenizer
from pretrain.cli import Parser, path, run_main
from pretrain.hub import find_repository, is_repository, snapshot_in


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=path, metavar="HF_FOLDER",
                        help="transformers folder: config.json, safetensors files and optionally a tokenizer; a folder "
                        "models--ORG--NAME of the Hub's cache; or the name of a repository, org/name")
    parser.add_argument("--output", type=path, required=True, metavar="OUT",
                        help="new run folder, with the weights in OUT/checkpoints/global_step0 and the tokenizer in "
                        "OUT/tokenizer; if OUT's own name is global_step0, only this checkpoint is written")
    args = parser.parse_args()
    check_new_weights(args.output, "imported")
    # report wrong files before torch is imported, which takes seconds
    name = str(args.folder)
    folder = find_repository(name, flag="HF_FOLDER", want="weights") if is_repository(name) else \
        snapshot_in(args.folder)
    found = check_hf_folder(folder)
    tokenizer = find_hf_tokenizer(found)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    from pretrain.checkpoint.convert.import_hf import import_hf

    import_hf(found, args.output, tokenizer)
    print(output_summary(args.output))
    print(f"{found.config.parameters_text()}, {found.dtype}, architecture {found.config.architecture}")
    for note in tokenizer.notes if tokenizer else ():
        print(f"note: {note}")
    if tokenizer is None:
        print("no tokenizer: the folder has neither tokenizer.model nor tokenizer.json")
    elif step_of(args.output) == 0:
        print("the tokenizer is not copied, because the output is a single checkpoint")


if __name__ == "__main__":
    run_main(main)
