"""The target's run, and the settings that the smaller runs share with it: OUT/run.yaml and OUT/deepspeed.json."""

import copy
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.active_extensions import extensions
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import path_text, say
from pretrain.commands.small_runs import RUN_YAML
from pretrain.config.flags.arguments import DEFAULTS, FLAGS, RunArguments
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.schedule import KINDS, Schedule
from pretrain.config.validate import check_run
from pretrain.data.data_spec import absolute_words, names_of_split
from pretrain.data.tokenizers.tokenizer import absolute_tokenizer
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError, listed
from pretrain.extensions.ladder.expected_curve import counted_parameters

STANDARD, MUP = "standard", "mup"
# GPT-3's peak rates, 6e-4 at a width of 768 and 0.6e-4 at 12,288 (arXiv 2005.14165, table 2.1), fall with this power
WIDTH_EXPONENT = math.log(10) / math.log(16)
_WSD_FRACTION, _LOWEST_RATIO = 0.2, 0.1  # of the decays, if the target's schedule has none
DEEPSPEED_JSON = "deepspeed.json"
# flags that the smaller runs have as the target; the ladder sets the others, or they have no effect on the loss
_KEPT = (
    "train_data", "valid_data", "test_data", "split", "sample_order", "packing",
    "tokenizer", "seq_length", "eod_mask_loss", "document_attention", "seed", "label_smoothing", "z_loss",
    "router_aux_loss", "router_z_loss", "expert_capacity_factor", "no_weight_decay", "gradient_value_clipping",
    "adaptive_clipping", "adaptive_clipping_window", "init_method", "output_init_method", "init_std", "mup_base_width",
    "embedding_dropout", "attention_dropout", "residual_dropout", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "gradient_clipping", "precision", "fp8", "compile_blocks", "tf32", "plain_operators",
    "emulate_fp16",
)
# flags of extensions that say how data is read
DATA_SETTINGS = tuple(name for each in extensions() if each.token_files for name in each.flags)
_NOT_SUPPORTED = {  # flag -> why a ladder cannot predict a run with it
    "dataset_module": "a ladder records its corpus by token files",
    "init_from": "a scaling law describes training from random weights",
    "resume_from": "a scaling law describes training from random weights",
    "blend_schedule": "the smaller runs end before the weights of the blend change",
    "seq_length_schedule": "the smaller runs would have other sequence lengths at the same number of tokens",
    "batch_schedule": "the smaller runs would have other batch sizes at the same number of tokens",
}
_JSON_KEYS = ("optimizer", "gradient_clipping", "bf16", "fp16", "data_types", "communication_data_type",
              "gradient_predivide_factor")


@dataclass(frozen=True)
class TargetRun:
    """The run that the ladder predicts."""

    plan: Plan

    @property
    def schedule(self) -> Schedule:
        schedule = self.plan.schedule
        assert schedule is not None  # read_target
        return schedule

    @property
    def parameters(self) -> int:
        return counted_parameters(self.plan.model)

    @property
    def tokens(self) -> int:
        return self.plan.length.tokens_after(self.plan.train_steps)

    @property
    def data_tokens(self) -> int:
        """Training tokens of one epoch."""
        return self.plan.datasets["train"].samples_per_epoch * self.plan.args.seq_length

    @property
    def peak_rate(self) -> float:
        """Peak learning rate; with muP that of the parameters that are not matrices, which no width changes."""
        return float(self.plan.get("optimizer.params.lr"))

    @property
    def scaling(self) -> str:
        return STANDARD if self.plan.args.mup_base_width is None else MUP

    @property
    def decay(self) -> tuple[float, float, str]:
        """Decay of the smaller runs, which is the target's if it has one: fraction of the run, lowest rate, shape."""
        schedule = self.schedule
        ratio = schedule.min_ratio if KINDS[schedule.kind].decays else _LOWEST_RATIO
        if not schedule.wsd_steps:
            return _WSD_FRACTION, ratio, "linear"
        return schedule.wsd_steps / schedule.decay_steps, ratio, schedule.decay_shape

    def rate(self, hidden_size: int, tokens_per_step: int) -> float:
        """Return the peak rate of a smaller model.

        It grows with the square root of the batch (arXiv 2205.10287) and, without muP, as the width falls.
        """
        of_batch = math.sqrt(tokens_per_step / self.plan.layout.tokens_per_step)
        of_width = 1.0 if self.scaling == MUP else (self.plan.model.hidden_size / hidden_size) ** WIDTH_EXPONENT
        return self.peak_rate * of_batch * of_width


def read_target(path: str, *, world_size: int, device: Device) -> TargetRun:
    """Read and check the YAML of the target's run, with its data. Raises ConfigError."""
    try:
        args = parse_arguments(["--config", path])
    except ConfigError as error:
        raise ConfigError.from_line(str(error).replace("--config", "--target", 1)) from None
    for name, reason in _NOT_SUPPORTED.items():
        if getattr(args, name) is not None:
            raise ConfigError(f"--target {path}: {name}", problem=reason, remedy="leave the key out")
    try:
        plan = check_run(args, world_size=world_size, device=device)
    except ConfigError as error:  # its flags are keys of this file, and no flags of the ladder
        raise ConfigError.from_line(f"--target {path}: {error}") from None
    if plan.schedule is None:
        raise ConfigError(f"--target {path}", problem="the DeepSpeed JSON has a scheduler, and the smaller runs need "
                          "another one", remedy="remove it, and give --lr_schedule")
    if not names_of_split(plan.datasets, "valid"):
        raise ConfigError(f"--target {path}", problem="the run has no validation data, whose loss is predicted",
                          remedy="give valid_data, or a split with a second part")
    return TargetRun(plan)


def say_left_out(given: Iterable[str]) -> None:
    """Print a note about flags of the target that the smaller runs do not get, although they may change its loss."""
    of_extensions = {"extension", *(name for each in extensions() if each.name != "ladder" for name in each.flags)}
    if flags := [f"--{name}" for name in given if name in of_extensions]:
        say(f"note: the smaller runs do without {listed(flags)} of the target: flags of extensions are not passed on")


def write_settings(target: TargetRun, folder: Path, *, ranks: int) -> None:
    """Write OUT/run.yaml and OUT/deepspeed.json: what all runs of the ladder have in common."""
    write_atomically(folder / DEEPSPEED_JSON, json.dumps(_deepspeed_json(target.plan, ranks), indent=1) + "\n")
    flags = {"deepspeed_config": DEEPSPEED_JSON, **_kept_flags(target.plan.args), "lr_schedule": "wsd",
             "lr_decay_shape": target.decay[2], "min_lr_ratio": target.decay[1], "resume": "auto"}
    write_atomically(folder / RUN_YAML, "# of all runs of the ladder; each has further flags, see plan.json\n"
                     + yaml.safe_dump(flags, sort_keys=False))


def _kept_flags(args: RunArguments) -> dict[str, Any]:
    """Return the flags that the smaller runs have as the target, with absolute paths."""
    flags = {name: value for name in _KEPT if (value := getattr(args, name)) != getattr(RunArguments, name)}
    for name in ("train_data", "valid_data", "test_data"):
        if name in flags:
            flags[name] = absolute_words(flags[name])
    for name in DATA_SETTINGS:
        if (value := args.value(name)) != DEFAULTS[name]:
            flags[name] = os.path.abspath(value) if FLAGS[name].parse is path_text else value
    if flags.get("tokenizer"):
        flags["tokenizer"] = absolute_tokenizer(flags["tokenizer"])
    return flags


def _deepspeed_json(plan: Plan, ranks: int) -> dict[str, Any]:
    """Return optimizer, precision and clipping of the target's JSON; ranks are data-parallel."""
    config = {name: copy.deepcopy(plan.file.values[name]) for name in _JSON_KEYS if name in plan.file.values}
    if "optimizer" in config:
        config["optimizer"].setdefault("params", {})["lr"] = "auto"
    return {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", **config,
            "zero_optimization": {"stage": 0 if ranks == 1 else 1}}
