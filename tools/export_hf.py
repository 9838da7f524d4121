#!/usr/bin/env python3
"""Export a checkpoint of any layout as a folder for transformers: weights, config, tokenizer and a model card."""

import os

from pretrain.checkpoint.convert.new_folder import output_summary
from pretrain.checkpoint.convert.plan_export import SHARD_GB, plan_export
from pretrain.checkpoint.format.verify import reject_damaged
from pretrain.cli import Parser, number, path, path_text, run_main, whole_number
from pretrain.config.layout import DTYPE_BYTES


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("run", type=path, metavar="RUN_OR_CKPT",
                        help="run folder (--save of the run), or one of its global_stepN folders")
    parser.add_argument("--output", type=path, required=True, metavar="FOLDER", help="new folder")
    parser.add_argument("--step", type=whole_number(), metavar="N",
                        help="step of the checkpoint (default: the newest complete checkpoint)")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES),
                        help="data type of the weights (default: the precision of the run)")
    parser.add_argument("--shard_size", type=number(0, 1e6, above=True), default=SHARD_GB, metavar="GB",
                        help="largest size of a weights file in GB (default: %(default)g)")
    parser.add_argument("--tokenizer", type=path_text, metavar="PATH",
                        help="tokenizer to export (default: the run's --tokenizer)")
    args = parser.parse_args()
    # report wrong inputs before torch is imported, which takes seconds
    plan = plan_export(args.run, args.output, step=args.step, dtype=args.dtype, shard_gb=args.shard_size,
                       tokenizer=args.tokenizer)
    reject_damaged(plan.folder, plan.manifest)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    from pretrain.checkpoint.convert.export_hf import export_hf

    notes = export_hf(plan)
    print(output_summary(args.output))
    print(f"{plan.config.parameters_text()}, {plan.dtype}, architecture {plan.config.architecture}, "
          f"from {plan.folder}")
    for note in notes:
        print(note)


if __name__ == "__main__":
    run_main(main)
