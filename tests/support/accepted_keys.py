"""DeepSpeed JSONs that together have every accepted key and value of the schema, in every accepted combination of two.

The schema itself generates them: a new key is tested without a change of this file. `own_values` has the keys whose
values the schema does not describe.
"""

import copy
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.config.auto_values import set_value
from pretrain.config.ds_json.check_keys import takes_default
from pretrain.config.ds_json.optimizers import KNOWN_NAMES, REQUIRED_SCHEDULER_PARAMS, SCHEDULERS, optimizer_params
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import PARTITION_METHODS, TREE, UNREAD, Key, Tree
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import detect_device
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from tests.support.cases import CPU, NO_NVME

Item = tuple[str, str]  # a dotted key, and its value as JSON
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
DEGREES: dict[str, dict[str, Any]] = {
    "data": {}, "pipeline": {"pipeline": {"stages": 2}}, "tensor": {"tensor_parallel": {"autotp_size": 2}},
    "sequence": {"sequence_parallel_size": 2}, "expert": {"expert_parallel": {"enabled": True, "autoep_size": 2}}}
MODEL = ("tiny", "vocab_size=256,n_layer=2,n_embd=32,n_head=4")
MIXTURE = ("tiny-moe", "vocab_size=256,hidden_size=32,intermediate_size=64,num_hidden_layers=2")
SEQ_LENGTH, STEPS = 32, 2
_OF_SKELETONS = ("zero_optimization.stage", "zero_optimization.offload_optimizer.device",
                  "zero_optimization.offload_param.device", "bf16.enabled", "fp16.enabled", "bfloat16.enabled",
                  "pipeline.stages", "tensor_parallel.autotp_size", "sequence_parallel_size",
                  "expert_parallel.enabled", "expert_parallel.autoep_size", "train_batch_size",
                  "optimizer.type", "scheduler.type")
_METHODS = [*PARTITION_METHODS, "type:block"]


def own_values(folder: Path) -> dict[str, list[Any]]:
    """Return the values of keys that the schema describes too broadly: files, names, rates and batch sizes."""
    return {
        "train_micro_batch_size_per_gpu": [1, 2, "auto"], "gradient_accumulation_steps": [1, 2, 4, "auto"],
        "pipeline.partition": _METHODS, "pipeline.partition_method": _METHODS,
        "tensor_parallel.tensor_parallel.tp_size": [1, 2], "tensor_parallel.tp.tp_size": [1, 2],
        "zero_optimization.offload_param.nvme_path": [str(folder)], "zero_optimization.zero_hpz_partition_size": [0, 2],
        "zero_optimization.offload_optimizer.nvme_path": [str(folder)],
        "zero_optimization.offload_param.buffer_size": [200_000],
        "tensorboard.output_path": [str(folder / "tensorboard"), ""], "csv_monitor.output_path": [str(folder), ""],
        "flops_profiler.output_file": [str(folder / "flops.txt"), None], "comms_logger.prof_ops": [[], ["all_reduce"]],
        # counts of threads and of pinned buffers
        "aio.block_size": [4096, 1_048_576], "aio.intra_op_parallelism": [1, 2],
        "zero_optimization.offload_param.buffer_count": [4, 8],
        "zero_optimization.offload_optimizer.buffer_count": [4, 5], "optimizer.params.lr": [0.01, "auto"],
        "optimizer.params.betas": [[0.9, 0.95], [0, 0], "auto"], "optimizer.params.muon_lr": [0.02],
        "optimizer.params.adam_lr": [0.003], "optimizer.params.etas": [[0.5, 1.2]],
        "optimizer.params.step_sizes": [[1e-6, 50]],
        "optimizer.params.eps": [1.1e-19, 1e-8, 0.5, "auto", [1.1e-19, 1e-3]],
        "scheduler.params.warmup_min_lr": [0, 0.001, "auto"], "scheduler.params.lr_range_test_min_lr": [0, 0.004],
        "scheduler.params.cycle_min_lr": [0.001], "scheduler.params.cycle_max_lr": [0.01],
        "scheduler.params.warmup_max_lr": [0.01, "auto"], "scheduler.params.total_num_steps": [3, "auto"],
        "scheduler.params.warmup_num_steps": [1, 2, "auto"],
    }


def values_of(dotted: str, key: Key, own: dict[str, list[Any]]) -> list[Any]:
    """Return values of a key that are legal by themselves: each choice, and the lowest number and larger ones."""
    if dotted in own:
        return own[dotted]
    low = 0 if key.low is None else key.low
    by_kind: dict[str, list[Any]] = {
        "bool": [True, False], "int": [int(low), int(low) + 1, 1000], "number": [low, 0.5, 2.0], "str": ["text"],
        "pair": [[low, 0.9]], "interval": [1, 1000], "list": [["text"]], "any": []}
    values = list(key.choices) or list(key.neutral) + ([False] if key.rejected else by_kind[key.kind])
    values = [value for value in values if isinstance(value, (str, bool, list)) or key.high is None
              or value <= key.high]
    return values + ["auto"] * (key.auto or takes_default(dotted)) + [None] * key.null


def keys_of(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield (dotted key, description) of every key of the tree, at every depth."""
    for name, key in tree.items():
        if isinstance(key, Key):
            yield prefix + name, key
        else:
            yield from keys_of(key, f"{prefix}{name}.")


@dataclass(frozen=True)
class Row:
    """One JSON of the table."""

    name: str
    config: dict[str, Any]
    items: frozenset[Item]  # its keys, those of the optimizer and scheduler with their type, and the skeleton's parts
    effective: frozenset[Item]  # those that change what DeepSpeed gets
    result: str  # what DeepSpeed gets


class Schema:
    """The keys of the schema with their values, and the rules that accept or reject a JSON on this machine."""

    def __init__(self, folder: Path, *, ranks: int) -> None:
        self.ranks, self.device, self.own = ranks, detect_device(), own_values(folder)
        self.models = {True: load_model_config(*MIXTURE), False: load_model_config(*MODEL)}
        keys = [(dotted, key) for dotted, key in keys_of({**UNREAD, **TREE}) if dotted not in _OF_SKELETONS]
        self.keys = [(dotted, key) for dotted, key in keys if not (key.rejected or key.ignored)]
        self.keys_without_effect = [(dotted, key) for dotted, key in keys if key.rejected or key.ignored]

    def accepted(self, config: dict[str, Any], *, mixture: bool | None = None) -> str:
        """Return what DeepSpeed gets, as text; "" if the JSON is rejected. Raises nothing: a rejection is one line.

        By default, the model is a mixture if the JSON shares experts among ranks.
        """
        args = RunArguments(save="run", train_steps=STEPS, seq_length=SEQ_LENGTH,
                            emulate_fp16=get_value(config, "fp16.enabled", False))
        try:
            model = self.models[has_experts(config) if mixture is None else mixture]
            plan = resolve_ds_config(DsFile("ds.json", config), args, model=model,
                                     world_size=self.ranks, device=self.device)
            check_rules(plan)
        except ConfigError:
            return ""
        return json.dumps([plan.ds_config, plan.args.compile_blocks], sort_keys=True)

    def skeletons(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, JSON) of each accepted combination of precision, ZeRO stage, offload and parallel degree."""
        nvme = {"device": "nvme", "nvme_path": self.own["zero_optimization.offload_param.nvme_path"][0]}
        offloads = {"none": {}, "cpu": {"offload_optimizer": CPU},
                    "both": {"offload_optimizer": CPU, "offload_param": CPU},
                    "nvme": {"offload_optimizer": nvme, "offload_param": {**nvme, "buffer_size": 200_000}}}
        for precision, stage, offload, degree in itertools.product(PRECISIONS, range(4), offloads, DEGREES):
            zero: dict[str, Any] = {"stage": stage, **offloads[offload]}
            config = {"train_batch_size": 8, "zero_optimization": zero, **PRECISIONS[precision], **DEGREES[degree],
                      "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
            if (stage == 3 or offload in ("none", "cpu")) and (offload != "nvme" or not NO_NVME) and \
                    self.accepted(config):
                yield f"{precision}_zero{stage}_{offload}_{degree}", copy.deepcopy(config)

    def settings(self, config: dict[str, Any]) -> list[tuple[str, list[Any]]]:
        """Return (dotted key, values) of all keys, with the parameters of the JSON's optimizer and scheduler."""
        trees = {"optimizer.params.": optimizer_params(config["optimizer"]["type"]) or {},
                 "scheduler.params.": SCHEDULERS.get(get_value(config, "scheduler.type"), {})}
        keys = [*self.keys, *(row for prefix, tree in trees.items() for row in keys_of(tree, prefix)
                              if not row[1].rejected)]
        return [(dotted, values_of(dotted, key, self.own)) for dotted, key in keys]


def has_experts(config: dict[str, Any]) -> bool:
    return bool(get_value(config, "expert_parallel.enabled"))


def item_of(dotted: str, value: Any, config: dict[str, Any]) -> Item:
    """Return the item of a key. A parameter belongs to one type of optimizer or scheduler."""
    block, is_parameter, _ = dotted.partition(".params.")
    return (f"{config[block]['type']}:" if is_parameter else "") + dotted, json.dumps(value)


def pairs_of(items: Iterable[Item]) -> set[tuple[Item, Item]]:
    """Return all pairs of items, each in one order."""
    return set(itertools.combinations(sorted(items), 2))


def table(schema: Schema, *, passes: int, seed: int = 0) -> Iterator[Row]:
    """Yield a row for each skeleton and pass. Each has as many keys as are accepted together, with the values that
    form the most pairs of effective items that no earlier row has.
    """
    numbers, covered = random.Random(seed), set[tuple[Item, Item]]()
    skeletons = list(schema.skeletons())
    for index in range(passes):
        numbers.shuffle(skeletons)
        for name, skeleton in skeletons:
            row = _filled(schema, f"{name}_{index}", skeleton, covered, numbers)
            covered |= pairs_of(row.effective)
            yield row


def _filled(schema: Schema, name: str, skeleton: dict[str, Any], covered: set[tuple[Item, Item]],
            numbers: random.Random) -> Row:
    """Add optimizer and scheduler to a skeleton, and then every other key in a random order."""
    parts = {("skeleton", part) for part in name.split("_")[:-1]}
    row = Row(name, skeleton, frozenset(parts), frozenset(parts), schema.accepted(skeleton))
    for dotted, values in (("optimizer.type", list(KNOWN_NAMES)), ("scheduler.type", [None, *SCHEDULERS])):
        row = _with_key(schema, row, dotted, values, covered, numbers)
    settings = schema.settings(row.config)
    numbers.shuffle(settings)
    for dotted, values in settings:
        row = _with_key(schema, row, dotted, values, covered, numbers)
    return row


def _with_key(schema: Schema, row: Row, dotted: str, values: list[Any], covered: set[tuple[Item, Item]],
              numbers: random.Random) -> Row:
    """Return the row with one more key, if the rules accept one of the values."""

    def new_pairs(value: Any) -> int:
        item = item_of(dotted, value, row.config)
        return sum((min(item, other), max(item, other)) not in covered for other in row.effective)

    for value in sorted(numbers.sample(values, len(values)), key=new_pairs, reverse=True):
        config = copy.deepcopy(row.config)
        if dotted == "scheduler.type":
            if value is None:
                return row
            set_value(config, "scheduler.params", {name: schema.own[f"scheduler.params.{name}"][0]
                                                   for name in REQUIRED_SCHEDULER_PARAMS.get(value, ())})
        if value in ("Lamb", "Adafactor"):
            config["zero_allow_untested_optimizer"] = True
        set_value(config, dotted, value)
        result = schema.accepted(config)
        if result:
            item = frozenset([item_of(dotted, value, config)])
            effective = row.effective | (item if result != row.result else frozenset())
            return Row(row.name, config, row.items | item, effective, result)
    return row


def reference(schema: Schema, row: Row) -> dict[str, Any]:
    """Return the JSON whose losses a row must have: its optimizer, scheduler and clipping in the plainest layout.

    `schema` is that of one rank. A mixture has micro-batches of the same size: the losses of its routers depend on it.
    """
    own = {name: row.config[name] for name in ("train_batch_size", "optimizer", "scheduler", "gradient_clipping")
           if name in row.config}
    if has_experts(row.config):
        own["train_micro_batch_size_per_gpu"] = json.loads(row.result)[0]["train_micro_batch_size_per_gpu"]
    for zero in ({"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 1, "offload_optimizer": CPU}):
        plain = {**copy.deepcopy(own), "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        if schema.accepted(plain, mixture=has_experts(row.config)):
            return plain
    raise AssertionError(f"no plain layout has {own}")
