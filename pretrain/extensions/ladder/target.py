"""The target's run, smaller models in its proportions, and the settings of their runs: run.yaml and deepspeed.json."""

import copy
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrain.active_extensions import extensions, model_flags
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.cli import say
from pretrain.commands.small_runs import RUN_YAML
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.config.schedule import KINDS, Schedule
from pretrain.config.validate import check_run
from pretrain.data.data_spec import absolute_words, names_of_split
from pretrain.data.tokenizers.tokenizer import absolute_tokenizer
from pretrain.distributed.device import Device
from pretrain.errors import ConfigError, counted, listed
from pretrain.extensions.ladder.expected_curve import counted_parameters
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES

FEWEST_SIZES = 3  # fewest sizes from which a law in N can be fitted
_WIDTH_MULTIPLE = 8  # inner sizes that do not divide evenly: kernels need aligned rows
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_size")
_PER_LAYER = ("layer_types", "mlp_only_layers")  # keys of a config.json with an entry for each layer, or its indices
STANDARD, MUP = "standard", "mup"
# GPT-3's peak rates, 6e-4 at a width of 768 and 0.6e-4 at 12,288 (arXiv 2005.14165, table 2.1), fall with this power
WIDTH_EXPONENT = math.log(10) / math.log(16)
_WSD_FRACTION, _LOWEST_RATIO = 0.2, 0.1  # decays, if the target's schedule has none
DEEPSPEED_JSON = "deepspeed.json"
# flags that the smaller runs have as the target; the ladder sets the others, or they have no effect on the loss
_KEPT = (
    "train_data", "valid_data", "test_data", "split", "sample_order", "packing", "data_cache", "data_cache_gb",
    "tokenizer", "seq_length", "eod_mask_loss", "document_attention", "seed", "label_smoothing", "z_loss",
    "router_aux_loss", "router_z_loss", "expert_capacity_factor", "no_weight_decay", "gradient_value_clipping",
    "adaptive_clipping", "adaptive_clipping_window", "init_method", "output_init_method", "init_std", "mup_base_width",
    "embedding_dropout", "attention_dropout", "residual_dropout", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "gradient_clipping", "precision", "compile_blocks", "tf32", "plain_operators",
    "emulate_fp16",
)
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
class Size:
    """A model of the family."""

    name: str  # name of its runs: h128-l2 has a hidden size of 128 and 2 layers
    config: ModelConfig
    parameters: int  # see counted_parameters
    shape_error: float  # how far depth and heads are from the target's proportions, which need whole numbers


def family_sizes(target: ModelConfig) -> list[Size]:
    """List the models with fewer heads than the target, in ascending order. Raises ConfigError if one is impossible.

    Head size, MLP ratio, number of experts and vocabulary are the target's. So is the ratio of query heads to key and
    value heads, or the next larger one that divides the query heads.
    """
    return sorted((_size(target, heads) for heads in range(1, target.num_heads)), key=lambda size: size.parameters)


def _size(target: ModelConfig, heads: int) -> Size:
    if target.architecture not in FAMILIES:
        raise ConfigError("--target", problem=f"{target.architecture} has no family here whose keys could be scaled",
                          remedy="use a model of a family: ds-pretrain ladder scales its sizes in proportion")
    ratio, depth = target.num_heads // target.num_kv_heads, target.num_layers * heads / target.num_heads
    layers = max(1, round(depth))
    kv_heads = max(number for number in range(1, heads + 1)
                   if heads % number == 0 and number * ratio <= max(heads, ratio))
    config = scaled_config(target, heads=heads, kv_heads=kv_heads, layers=layers)
    error = abs(math.log(layers / depth)) + abs(math.log(heads / kv_heads / ratio))
    return Size(f"h{config.hidden_size}-l{layers}", config, counted_parameters(config), error)


def scaled_config(target: ModelConfig, *, heads: int, kv_heads: int, layers: int) -> ModelConfig:
    """Return the target with another number of heads and layers, and all widths in proportion. Raises ConfigError."""
    fields = {"hidden_size": target.hidden_size * heads // target.num_heads, "num_layers": layers, "num_heads": heads,
              "num_kv_heads": kv_heads, "head_size": target.head_size,
              **{name: _scaled(getattr(target, name), heads, target.num_heads) for name in _INNER}}
    known, values = FAMILIES[target.architecture].keys, dict(target.hf_config)
    for name, value in fields.items():
        if target.key(name) in known and value:
            values[target.key(name)] = value
    older = FAMILIES[target.architecture].older_keys
    replaced = {target.key(name) for name in fields}
    values = {key: value for key, value in values.items() if older.get(key) not in replaced}
    for key in _PER_LAYER:
        values.update(_cut(key, values.get(key), layers))
    return model_config_from(values, f"a model of {heads} heads and {layers} layers in the proportions of --target")


def _scaled(size: int, heads: int, of_heads: int) -> int:
    """Return heads / of_heads of an inner size, rounded to a multiple if it does not divide evenly."""
    if size * heads % of_heads == 0:
        return size * heads // of_heads
    return max(1, round(size * heads / of_heads / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE


def _cut(key: str, value: Any, layers: int) -> dict[str, Any]:
    """Return the first `layers` entries of a list with one for each layer, or of indices those below `layers`."""
    if not isinstance(value, list):
        return {}
    kept = value[:layers]
    return {key: [index for index in value if index < layers] if all(isinstance(each, int) for each in value) else kept}


def choose_sizes(sizes: Sequence[Size], *, largest: float, spread: float, count: int) -> list[Size]:
    """Return up to `count` models whose numbers of parameters are nearest to a geometric series.

    The series ends with the largest model of at most `largest` parameters, and begins at a `spread`-th of it. Of
    models that are about as near, the one that is nearer to the target's proportions is taken.
    """
    possible = [size for size in sizes if size.parameters <= largest]
    if not possible:
        return []
    end = possible[-1].parameters
    wanted = [end * spread ** (-index / (count - 1)) for index in reversed(range(count))]
    found = [possible[-1] if number == end else
             min(possible, key=lambda size: abs(math.log(size.parameters / number)) + size.shape_error)
             for number in wanted]
    return sorted({size.name: size for size in found}.values(), key=lambda size: size.parameters)


def nearest_sizes(sizes: Sequence[Size], wanted: Iterable[float]) -> list[Size]:
    """Return the models that are nearest to the numbers of --parameters. Raises ConfigError if they are too few."""
    found = {min(sizes, key=lambda size: abs(math.log(size.parameters / number))).name for number in wanted} \
        if sizes else set()
    if len(found) < FEWEST_SIZES:
        known = ", ".join(f"{size.parameters:,}" for size in sizes[:12]) or "none"
        raise ConfigError("--parameters", problem=f"it names {counted(len(found), 'different model')}; the fit needs "
                          f"at least {FEWEST_SIZES}",
                          remedy="smaller models of the target's family have these numbers of parameters: "
                                 f"{known}{', ...' if len(sizes) > 12 else ''}")
    return [size for size in sizes if size.name in found]


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
    of_extensions = {"extension", *(name for each in extensions() if each.name != "ladder" and not each.model
                                    for name in each.flags)}
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
    flags |= model_flags(args)
    for name in ("train_data", "valid_data", "test_data"):
        if name in flags:
            flags[name] = absolute_words(flags[name])
    if "data_cache" in flags:
        flags["data_cache"] = os.path.abspath(flags["data_cache"])
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
