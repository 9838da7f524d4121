"""Export checkpoints for other programs."""

import os

from pretrain.checkpoint.convert.new_folder import output_summary
from pretrain.checkpoint.convert.plan_export import (
    SHARD_GB,
    ExportPlan,
    check_has_states,
    check_trainer_name,
    plan_export,
)
from pretrain.checkpoint.format.manifest import NOT_FINITE
from pretrain.checkpoint.format.verify import reject_damaged
from pretrain.cli import Parser, number, path, path_text, whole_number
from pretrain.config.layout import DTYPE_BYTES
from pretrain.errors import ConfigError
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code

_FORMATS = {
    "transformers": "weights, config, tokenizer and a model card, for from_pretrained",
    "universal": "weights and optimizer states in DeepSpeed's universal format, under transformers' names, for an "
                 "engine of the transformers model",
    "trainer": "both, and the state of transformers.Trainer: a folder checkpoint-N from which the Trainer resumes"}


def _parser() -> Parser:
    parser = Parser(description="Export a checkpoint of any layout for another program.",
                    epilog="Formats: " + "; ".join(f"{name}: {text}" for name, text in _FORMATS.items()) + ".")
    parser.add_argument("run", type=path, metavar="RUN_OR_CKPT",
                        help="run folder (--save of the run), or one of its global_stepN folders")
    parser.add_argument("--output", type=path, required=True, metavar="FOLDER",
                        help="new folder; with --format trainer, checkpoint-N in the Trainer's output_dir")
    parser.add_argument("--format", choices=tuple(_FORMATS), default="transformers",
                        help="format of the output, see below (default: %(default)s). \"ds-pretrain checkpoint "
                        "convert\" writes the universal format under the names of this program")
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
    if args.format == "universal":
        for flag in ("dtype", "shard_size", "tokenizer"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag}", problem="--format universal has no such choice: it has tensors in fp32, "
                                  "a file for each, and no tokenizer", remedy=f"leave --{flag} out")
    # report wrong inputs before torch is imported, which takes seconds
    plan = plan_export(args.run, args.output, step=args.step, dtype=args.dtype,
                       shard_gb=args.shard_size or SHARD_GB, tokenizer=args.tokenizer,
                       with_tokenizer=args.format != "universal")
    if args.format != "transformers":
        check_has_states(plan.folder, plan.manifest)
        if not plan.manifest.is_good:
            raise ConfigError(str(plan.folder), problem=NOT_FINITE, remedy="use an earlier checkpoint")
    if args.format == "trainer":
        check_trainer_name(args.output, plan.manifest.step)
    reject_damaged(plan.folder, plan.manifest)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    notes = _export(plan, args.format)
    print(output_summary(args.output))
    dtype = "fp32" if args.format == "universal" else plan.dtype
    print(f"{plan.config.parameters_text()}, {dtype}, architecture {plan.config.architecture}, from {plan.folder}")
    for note in notes:
        print(note)


def _export(plan: ExportPlan, output_format: str) -> list[str]:
    """Write the output, and return notes for the user. Imports torch."""
    if output_format == "universal":
        from pretrain.checkpoint.convert.universal import export_universal

        export_universal(plan)
        return [f'load_checkpoint("{plan.out.parent}", tag="{plan.out.name}") loads it, with "checkpoint": '
                '{"load_universal": true} in the DeepSpeed JSON']
    if output_format == "trainer":
        from pretrain.checkpoint.convert.universal import export_trainer

        return [*export_trainer(plan), f'train(resume_from_checkpoint="{plan.out}") resumes from it, with '
                '"checkpoint": {"load_universal": true} in the DeepSpeed JSON']
    from pretrain.checkpoint.convert.export_hf import export_hf

    return export_hf(plan)
