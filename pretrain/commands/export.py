"""Export checkpoints for other programs."""

import os

from pretrain.active_extensions import export_formats
from pretrain.checkpoint.convert.new_folder import output_summary
from pretrain.checkpoint.convert.plan_export import SHARD_GB, plan_export
from pretrain.checkpoint.format.verify import reject_damaged
from pretrain.cli import Parser, number, path, path_text, whole_number
from pretrain.config.layout import DTYPE_BYTES
from pretrain.errors import ConfigError
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code


def _parser() -> Parser:
    formats = {"transformers": "weights, config, tokenizer and a model card, for from_pretrained",
               **{name: each.help for name, each in export_formats().items()}}
    parser = Parser(description="Export a checkpoint of any layout for another program.",
                    epilog="Formats: " + "; ".join(f"{name}: {text}" for name, text in formats.items()) + ".")
    parser.add_argument("run", type=path, metavar="RUN_OR_CKPT",
                        help="run folder (--save of the run), or one of its global_stepN folders")
    parser.add_argument("--output", type=path, required=True, metavar="FOLDER", help="new folder")
    parser.add_argument("--format", choices=tuple(formats), default="transformers",
                        help="format of the output, see below (default: %(default)s)")
    parser.add_argument("--step", type=whole_number(), metavar="N",
                        help="step of the checkpoint (default: the newest complete checkpoint)")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES),
                        help="data type of the weights (default: the precision of the run)")
    parser.add_argument("--shard_size", type=number(0, 1e6, above=True), metavar="GB",
                        help=f"largest size of a weights file in GB (default: {SHARD_GB:g})")
    parser.add_argument("--tokenizer", type=path_text, metavar="PATH",
                        help="tokenizer to export (default: the run's --tokenizer)")
    parser.add_argument("--model_code", type=imported_model_code, metavar="my_model:MyConfig", help=MODEL_CODE_HELP)
    return parser


def main() -> None:
    args = _parser().parse_args()
    chosen = export_formats().get(args.format)  # None: the format of transformers
    states_only = chosen is not None and chosen.states_only
    for flag in ("dtype", "shard_size", "tokenizer") if states_only else ():
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag}", problem=f"--format {args.format} has no such choice: it has tensors in "
                              "fp32, a file for each, and no tokenizer", remedy=f"leave --{flag} out")
    # report wrong inputs before torch is imported, which takes seconds
    plan = plan_export(args.run, args.output, step=args.step, dtype=args.dtype,
                       shard_gb=args.shard_size or SHARD_GB, tokenizer=args.tokenizer, with_tokenizer=not states_only)
    if chosen is not None:
        chosen.check(plan)
    reject_damaged(plan.folder, plan.manifest)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    if chosen is None:
        from pretrain.checkpoint.convert.export_hf import export_hf  # imports torch

        notes = export_hf(plan)
    else:
        notes = chosen.export(plan)
    print(output_summary(args.output))
    print(f"{plan.config.parameters_text()}, {'fp32' if states_only else plan.dtype}, "
          f"architecture {plan.config.architecture}, from {plan.folder}")
    for note in notes:
        print(note)
