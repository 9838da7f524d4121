"""Checkpoints with optimizer states for other programs: the subcommand, the formats, and what they cannot hold."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.extension import ExportFormat, Extension

if TYPE_CHECKING:
    from pretrain.checkpoint.convert.plan_export import ExportPlan
    from pretrain.checkpoint.format.manifest import Manifest

_LOADS_IT = '"checkpoint": {"load_universal": true} in the DeepSpeed JSON'


def check_has_states(folder: Path, manifest: "Manifest") -> None:
    """Raise ConfigError unless the universal format can hold the optimizer states of a checkpoint."""
    from pretrain.config.ds_json.optimizers import OPTIMIZERS
    from pretrain.errors import ConfigError
    from pretrain.own_code import is_own

    if manifest.weights_only:
        raise ConfigError(str(folder), problem="this checkpoint has only weights, and the universal format needs the "
                          "optimizer's states", remedy="name a checkpoint that a run wrote")
    if manifest.initialization.get("mup_base_width") is not None:
        raise ConfigError(str(folder), problem="it was trained with --mup_base_width, and DeepSpeed's universal format "
                          "has one learning rate for all parameters",
                          remedy="resume with ds-pretrain, which loads checkpoints of any layout")
    row = OPTIMIZERS.get(manifest.layout.optimizer)
    if is_own(manifest.layout.optimizer) or (row is not None and (not row.elementwise or row.states_in_blocks)):
        name = manifest.layout.optimizer if row is None else row.name
        raise ConfigError(str(folder), problem=f"it was trained with {name}, and the universal format has only "
                          "optimizer states with a number for each weight",
                          remedy="export the weights with --format transformers")


def _check(plan: "ExportPlan") -> None:
    """Raise ConfigError for a checkpoint that the formats cannot hold, or which no program should resume from."""
    from pretrain.checkpoint.format.manifest import NOT_FINITE
    from pretrain.errors import ConfigError

    check_has_states(plan.folder, plan.manifest)
    if not plan.manifest.is_good:
        raise ConfigError(str(plan.folder), problem=NOT_FINITE, remedy="use an earlier checkpoint")


def _check_trainer(plan: "ExportPlan") -> None:
    """Raise ConfigError also if the folder has the name of a Trainer's checkpoint of another step."""
    from pretrain.errors import ConfigError

    _check(plan)
    named, step = re.fullmatch(r"checkpoint-(\d+)", plan.out.name), plan.manifest.step
    if named and int(named[1]) != step:
        raise ConfigError("--output", problem=f"{plan.out.name} is the name of step {named[1]}, and the checkpoint is "
                          f"of step {step}", remedy=f"name it checkpoint-{step}")


def _universal(plan: "ExportPlan") -> list[str]:
    from pretrain.extensions.universal.write_universal import export_universal

    export_universal(plan)
    return [f'load_checkpoint("{plan.out.parent}", tag="{plan.out.name}") loads it, with {_LOADS_IT}']


def _trainer(plan: "ExportPlan") -> list[str]:
    from pretrain.extensions.universal.write_universal import export_trainer

    return [*export_trainer(plan), f'train(resume_from_checkpoint="{plan.out}") resumes from it, with {_LOADS_IT}']


def _convert(args: argparse.Namespace) -> int:
    from pretrain.checkpoint.convert.new_folder import check_new_folder, output_summary
    from pretrain.checkpoint.load.find_checkpoint import find_checkpoint
    from pretrain.commands.checkpoint import verify_and_print

    source = find_checkpoint(args.checkpoint)
    check_new_folder(args.out)
    if verify_and_print(*source):
        return 1
    from pretrain.extensions.universal.write_universal import convert

    convert(source[0], args.out)
    print(output_summary(args.out))
    return 0


def _add_convert(commands: Any) -> None:
    from pretrain.cli import path
    from pretrain.commands.checkpoint import CHECKPOINT_HELP

    text = "convert to the universal format, which plain DeepSpeed can load"
    command = commands.add_parser("convert", help=text, description=text)
    command.set_defaults(function=_convert)
    command.add_argument("checkpoint", type=path, help=CHECKPOINT_HELP)
    command.add_argument("out", type=path, help="new folder")


EXTENSION = Extension(
    "universal", "Writes checkpoints with optimizer states for DeepSpeed alone, and for transformers.Trainer.",
    extends={"checkpoint": _add_convert},
    exports={
        "universal": ExportFormat(
            "weights and optimizer states in DeepSpeed's universal format, under transformers' names, for an engine of "
            "the transformers model; \"ds-pretrain checkpoint convert\" writes it under the names of this program",
            _universal, _check, states_only=True),
        "trainer": ExportFormat(
            "both, and the state of transformers.Trainer: a folder checkpoint-N in its output_dir, from which it "
            "resumes",
            _trainer, _check_trainer)})
