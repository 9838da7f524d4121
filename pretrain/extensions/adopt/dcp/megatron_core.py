"""Read a checkpoint of Megatron Core in its format torch_dist: iter_NNNNNNN/ with .metadata, common.pt, __R_N.distcp.

Weights have the names of Megatron Core's GPTModel. All layers of a parameter are stacked in one tensor, [layers, ...],
or, with `singleton_local_shards` or different layers, have a tensor each. `linear_qkv` has for each key head its
queries, its key and its value; `linear_fc1` of a gated MLP has the gate first. Optimizer states have the shape of their
weight in the format `fully_reshardable` (`optimizer.state.param...` are the master weights), and those of an optimizer
that is not distributed, too (`fp32_param`). In the format `dp_reshardable` they are buckets without names, and cannot
be adopted.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.dcp.files import METADATA, DcpFiles
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, Shape
from pretrain.extensions.adopt.mapping import (
    load_foreign_pickle,
    precision_of_dtype,
    read_in_module,
    shapes_in_module,
    whole_number,
)
from pretrain.extensions.adopt.megatron.config import megatron_core_config
from pretrain.extensions.adopt.megatron.layer_files import EnumValue, Ignored
from pretrain.extensions.adopt.megatron.names import BY_HEAD, merge_qkv
from pretrain.extensions.adopt.megatron.states import read_schedule
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.description import Parameter
from pretrain.model.hf_names import TensorRule
from pretrain.model.hf_weights import rules_by_module_tensors

_EMBEDDING = "embedding.word_embeddings.weight"
_COMMON = "common.pt"
_PREFIXES = ("", "module.", "model.")
_SAVE_AGAIN = "let Megatron-LM load it, and save it with --dist-ckpt-optim-fully-reshardable"
_OTHER_MODEL = "name the config.json of this model by --model"
_OUTSIDE = {"embedding": "embedding.word_embeddings", "positions": "embedding.position_embeddings",
            "norm": "decoder.final_layernorm", "head": "output_layer"}
# our module in a block -> theirs; {} is weight or bias. A norm is a part of the matrix that follows it, or a module
_IN_LAYER = {
    "norm1": ("self_attention.linear_qkv.layer_norm_{}", "input_layernorm.{}"),
    "norm2": ("mlp.linear_fc1.layer_norm_{}", "pre_mlp_layernorm.{}"),
    "attention.qkv": ("self_attention.linear_qkv.{}",), "attention.out": ("self_attention.linear_proj.{}",),
    "attention.q_norm": ("self_attention.q_layernorm.{}",), "attention.k_norm": ("self_attention.k_layernorm.{}",),
    "mlp.gate": ("mlp.linear_fc1.{}_w", "mlp.linear_fc1.{}"), "mlp.up": ("mlp.linear_fc1.{}_v", "mlp.linear_fc1.{}"),
    "mlp.down": ("mlp.linear_fc2.{}",)}
_STACKED = "mlp.linear_fc1."
_STATE = "optimizer.state."
_MASTERS = ("param", "fp32_param")
_ADAM = ("exp_avg", "exp_avg_sq")
_NOT_WEIGHTS = ("optimizer", "rng_state", "rerun_state_machine")
_EXTRA = re.compile(r".*_extra_state(/shard_[\d_.]+)?")  # states of Transformer Engine: scales of fp8
# Classes in common.pt, besides tensors and containers. An empty Namespace is created, and nothing of the file is run.
_ALLOWED: tuple[Any, ...] = (
    argparse.Namespace,
    *((EnumValue, f"megatron.core.{module}.{name}") for module, name in (
        ("transformer.enums", "AttnBackend"), ("transformer.enums", "AttnMaskType"), ("transformer.enums", "AttnType"),
        ("transformer.enums", "LayerType"), ("transformer.enums", "ModelType"), ("enums", "ModelType"))),
    *((Ignored, f"signal.{name}") for name in ("Signals",)))


def is_megatron_core(files: DcpFiles) -> bool:
    """Return whether the names of the tensors are Megatron Core's."""
    return any(f"{prefix}{_EMBEDDING}" in files.tensors for prefix in _PREFIXES)


def read(files: DcpFiles, config: Mapping[str, Any] | None) -> ForeignRun:
    """Return what a checkpoint holds. Raises ConfigError.

    Args:
        config: content of a config.json; None: it is made from the arguments in common.pt.
    """
    path = files.folder / _COMMON
    common = load_foreign_pickle(path, also=_ALLOWED)
    given = common.get("args") if isinstance(common, dict) else None
    if not isinstance(given, argparse.Namespace):
        raise ConfigError(str(path), problem="it has no args", remedy="use a checkpoint that Megatron-LM has written")
    args, where = vars(given), f"{path}: args"
    prefix = next(prefix for prefix in _PREFIXES if f"{prefix}{_EMBEDDING}" in files.tensors)
    rows = files.tensors[prefix + _EMBEDDING].shape[0]
    values = dict(config) if config is not None else megatron_core_config(args, where, vocab_size=rows)
    model = model_config_from(values, "config.json" if config is not None else where)
    tensors = _Tensors(files, model, prefix)
    tensors.check()
    states, omissions = _states(tensors)
    groups = _groups(common)
    batch = whole_number(args.get("global_batch_size")) if args.get("rampup_batch_size") is None else None
    schedule, notes = read_schedule(common.get("opt_param_scheduler"), batch)
    rates = [float(group["lr"]) for group in groups if "lr" in group]  # the schedule was advanced before the save
    clipping = args.get("clip_grad") if isinstance(args.get("clip_grad"), (int, float)) else None
    step, updates = whole_number(common.get("iteration")), _updates(common, groups)
    if step is None or step < 0:
        raise ConfigError(f"{path}: iteration", found=common.get("iteration"), expected="a number of steps")
    if args.get("fp16") and updates is not None and updates > step:
        raise ConfigError(f"{path}: optimizer", found=f"{updates:g} updates", expected=f"at most {step}, the iteration")
    return ForeignRun(
        program=f"Megatron Core, tensor parallelism {args.get('tensor_model_parallel_size', '?')}, pipeline stages "
                f"{args.get('pipeline_model_parallel_size', '?')}",
        folder=files.folder, files=(*files.files, path), config=values, shapes=tensors.shapes, read=tensors.read,
        states=states, step=step, optimizer_step=updates or 0.0,
        skipped_steps=int(step - updates) if args.get("fp16") and updates is not None else 0,
        optimizer=_optimizer(args, groups, schedule) if states else {},
        schedule={**schedule, **({"next_rate": max(rates)} if rates else {})},
        global_batch_size=batch, consumed_samples=whole_number(args.get("consumed_train_samples")),
        seq_length=whole_number(args.get("seq_length")), precision=tensors.precision,
        seed=whole_number(args.get("seed")),
        ds_config={"gradient_clipping": float(clipping)} if clipping else None,  # the rest of a JSON has no counterpart
        omissions=(*omissions, *_growing_decay(common)), notes=(*notes, *tensors.notes()))


@dataclass(frozen=True)
class _Source:
    """The tensor of Megatron Core, or the part of it, that holds one of our parameters."""

    parameter: Parameter
    key: str  # key of the weight
    layer: int | None  # in a tensor that stacks the layers
    half: int | None  # half of the rows: the first half holds the gate, the second one the other matrix
    is_vocabulary: bool


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a checkpoint, under transformers' names."""

    files: DcpFiles
    model: ModelConfig
    prefix: str
    rules: list[tuple[TensorRule, ...]] = field(init=False)
    sources: dict[str, _Source] = field(init=False)  # by our name

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rules_by_module_tensors(self.model))
        object.__setattr__(self, "sources", dict(self._find_sources()))

    def _find_sources(self) -> Iterator[tuple[str, _Source]]:
        for ours, parameter, layer, block in self.model.placed_parameters():
            found = self._in_layer(block, parameter) if layer.kind == "block" else self._outside(
                layer.kind if layer.class_name != "EmbeddingNorm" else "", parameter)
            if found is None:
                raise ConfigError(f"{self.files.folder}: {ours}", problem="the model of the config.json has this "
                                  "parameter, and the checkpoint does not", remedy=_OTHER_MODEL)
            yield ours, found

    def _outside(self, kind: str, parameter: Parameter) -> _Source | None:
        last = "bias" if parameter.name.endswith("bias") else "weight"
        key = f"{self.prefix}{_OUTSIDE.get(kind, '')}.{last}"
        known = key in self.files.tensors
        return _Source(parameter, key, None, None, kind in ("embedding", "head")) if known else None

    def _in_layer(self, block: int, parameter: Parameter) -> _Source | None:
        module, _, last = parameter.name.rpartition(".")
        candidates = [name.format(last) for name in _IN_LAYER.get(module, ())]
        if module == "mlp.up" and not self.model.gated_mlp:
            candidates = [f"{_STACKED}{last}"]
        for name in candidates:
            halved = self.model.gated_mlp and name == f"{_STACKED}{last}"
            half = (0 if module == "mlp.gate" else 1) if halved else None
            for key, layer in ((f"{self.prefix}decoder.layers.{name}", block),
                               (f"{self.prefix}decoder.layers.{block}.{name}", None)):
                if key in self.files.tensors:
                    return _Source(parameter, key, layer, half, False)
        return None

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each parameter of transformers."""
        return shapes_in_module(self.rules, self.model)

    @property
    def precision(self) -> str:
        """Precision of the model's weights."""
        return precision_of_dtype(self.files.tensors[self.prefix + _EMBEDDING].dtype)

    @property
    def masters(self) -> str:
        """Beginning of the keys of the master weights; "" if there are none."""
        return next((f"{_STATE}{name}." for name in _MASTERS
                     if f"{_STATE}{name}.{self.prefix}{_EMBEDDING}" in self.files.tensors), "")

    def check(self) -> None:
        """Compare names and shapes with the model's. Raises ConfigError."""
        used = {source.key for source in self.sources.values()}
        for key in (*self.files.tensors, *self.files.objects):
            if key not in used and not key.startswith(_NOT_WEIGHTS) and not _EXTRA.fullmatch(key):
                raise ConfigError(f"{self.files.folder / METADATA}: {shorten(key)}", problem="the checkpoint has this "
                                  "parameter, and the model of the config.json does not", remedy=_OTHER_MODEL)
        for source in self.sources.values():
            stored, expected = self.files.tensors[source.key].shape, source.parameter.shape
            found = stored if source.layer is None else stored[1:]
            if source.half is not None:
                expected = (2 * expected[0], *expected[1:])
            if source.is_vocabulary and found[1:] == expected[1:] and found[0] >= expected[0]:
                continue  # the other rows pad the vocabulary
            if found != expected or (source.layer is not None and stored[0] != self.model.num_layers):
                raise ConfigError(f"{self.files.folder}: {source.key}", found=f"the shape {list(stored)}",
                                  expected=f"{list(expected)}, as the config.json says"
                                  + ("" if source.layer is None else f", for each of {self.model.num_layers} layers"),
                                  remedy=_OTHER_MODEL)

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a complete tensor under transformers' name, in fp32. Raises ConfigError."""
        return read_in_module(name, self.rules, self.model, lambda ours: self._ours(ours, state))

    def _ours(self, name: str, state: str) -> torch.Tensor:
        """Return a complete parameter of ours, in fp32."""
        source = self.sources[name]
        beginning = self.masters if state == "fp32" else f"{_STATE}{state}."
        tensor = self.files.read(beginning + source.key, source.layer).float()
        if source.half is not None:
            tensor = tensor.chunk(2)[source.half]
        if source.parameter.name.startswith("attention.qkv."):
            tensor = merge_qkv([tensor], self.model, BY_HEAD)
        return tensor[:self.model.vocab_size] if source.is_vocabulary else tensor

    def notes(self) -> list[str]:
        """Return what users should know about the vocabulary."""
        rows, size = self.files.tensors[self.prefix + _EMBEDDING].shape[0], self.model.vocab_size
        return [f"{rows - size} of the {rows} rows of the vocabulary pad it, and are left out; Megatron Core has their "
                "logits in its loss"] if rows > size else []


def _states(tensors: _Tensors) -> tuple[tuple[str, ...], list[Omission]]:
    """Return the optimizer states that can be read, and what is lost. Raises ConfigError for a missing one."""
    stored = tensors.files.tensors
    kinds = {key.removeprefix(_STATE).partition(".")[0] for key in stored if key.startswith(_STATE)}
    reason = ""
    if not any(key.startswith("optimizer") for key in stored):
        reason = "the checkpoint has weights alone"
    elif any(".gbuf_idx_" in key for key in stored):
        reason = f"its states are in buckets without names, as in the format dp_reshardable: {_SAVE_AGAIN}"
    elif not {*_ADAM} <= kinds or kinds - {*_ADAM, *_MASTERS}:
        reason = f"its states are {', '.join(sorted(kinds)) or 'not under optimizer.state'}, and not those of Adam"
    omissions = [] if not reason else [Omission("optimizer", reason)]
    if tensors.precision != "fp32" and (reason or not tensors.masters):
        omissions.append(Omission("master_weights", reason or "the checkpoint has weights in 16 bits alone"))
    beginnings = [f"{_STATE}{state}." for state in (_ADAM if not reason else ())]
    for beginning in (*beginnings, *([tensors.masters] if tensors.masters else [])):
        for source in tensors.sources.values():
            found = stored.get(beginning + source.key)
            if found is None or found.shape != stored[source.key].shape:
                raise ConfigError(f"{tensors.files.folder / METADATA}: {shorten(beginning + source.key)}",
                                  found="nothing" if found is None else f"the shape {list(found.shape)}",
                                  expected=f"{list(stored[source.key].shape)}, as of the weight", remedy=_SAVE_AGAIN)
    return _ADAM if not reason else (), omissions


def _groups(common: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the optimizer's parameter groups: of a distributed optimizer, they are one level deeper."""
    optimizer = common.get("optimizer")
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    groups = inner.get("param_groups", []) if isinstance(inner, dict) else []
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _updates(common: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> float | None:
    """Return the optimizer's count of updates; None: it is not recorded. Raises ConfigError for several counts."""
    optimizer = common.get("optimizer") or {}
    inner = optimizer.get("optimizer", optimizer)
    found = [group["step"] for group in groups if group.get("step") is not None]
    state = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(state, dict) and state.get("common_step") is not None:
        found.append(state["common_step"])
    counts = {float(count) for count in found}
    if len(counts) > 1:
        raise ConfigError(f"{_COMMON}: optimizer", found=f"the steps {sorted(counts)}", expected="one number of steps")
    return counts.pop() if counts else None


def _optimizer(args: Mapping[str, Any], groups: list[Mapping[str, Any]], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return type and parameters. Megatron's Adam has decoupled weight decay unless an argument says otherwise."""
    kind = str(args.get("optimizer", "adam"))
    if kind == "adam":
        kind = "Adam" if args.get("decoupled_weight_decay") is False else "AdamW"
        if any(group.get("bias_correction") is False for group in groups):
            kind += " without bias correction"
    first: Mapping[str, Any] = groups[0] if groups else {}
    betas = first.get("betas") or [args[name] for name in ("adam_beta1", "adam_beta2") if args.get(name) is not None]
    params = {"lr": schedule.get("peak_rate", args.get("lr")), "eps": first.get("eps", args.get("adam_eps")),
              "weight_decay": max((group["weight_decay"] for group in groups if "weight_decay" in group),
                                  default=args.get("weight_decay"))}
    known = {name: float(value) for name, value in params.items() if isinstance(value, (int, float))}
    return {"type": kind, "params": {**known, **({"betas": [float(beta) for beta in betas]} if betas else {})}}


def _growing_decay(common: Mapping[str, Any]) -> list[Omission]:
    """Return an omission if the schedule changes the weight decay, which is constant here."""
    state = common.get("opt_param_scheduler")
    ends = [state.get(name) for name in ("start_wd", "end_wd")] if isinstance(state, dict) else []
    return [Omission("weight_decay", f"it changes from {ends[0]} to {ends[1]}, and remains that of the last step")] \
        if len({*ends}) > 1 else []
