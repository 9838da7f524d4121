"""Read a checkpoint of GPT-NeoX or Megatron-DeepSpeed: layers of a pipeline, tensor-parallel parts, ZeRO stage 1.

layer_files.py lists the files, names.py says where each parameter is and merges its parts, and states.py and config.py
read the rest. Master weights and optimizer states are in the ZeRO files or, without ZeRO, in the files of the mp ranks.
Each master weight is compared with the layer file. Without an optimizer, the layer files have the weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint.format.shard_index import FP32
from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission
from pretrain.extensions.adopt.mapping import module_shapes, precision_of_dtype, read_in_module, shapes_in_module
from pretrain.extensions.adopt.megatron.config import megatron_config, neox_config
from pretrain.extensions.adopt.megatron.layer_files import LayerFiles, check_counts, find_files, load, load_layers
from pretrain.extensions.adopt.megatron.names import (
    BY_HEAD,
    BY_PART,
    NEOX,
    Key,
    PeerLayout,
    Place,
    find_layout,
    key_of,
    merge,
    merge_qkv,
    part_shape,
)
from pretrain.extensions.adopt.megatron.states import (
    RankStates,
    Settings,
    read_ranks,
    read_settings,
    read_step,
    with_states,
)
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.description import Parameter
from pretrain.model.hf_names import TensorRule
from pretrain.model.hf_weights import rules_by_module_tensors

_VOCABULARY = ("embedding", "head")
# biases that GPT-NeoX adds on each tensor-parallel rank before the sum over ranks, if attention and MLP are parallel
# (megatron/model/transformer.py, gpt_j_residual; mpu/layers.py, RowParallelLinear with parallel_output)
_SUMMED = ("attention.out.bias", "mlp.down.bias")
_OTHER_MODEL = "name the config.json of this model by --model"


@dataclass(frozen=True)
class Source:
    """One of our parameters, and where theirs is."""

    parameter: Parameter
    place: Place
    kind: str  # kind of the layer


@dataclass
class Tensors:
    """The tensors of a checkpoint, under transformers' names.

    Raises ConfigError unless the files have all parameters of the model, in the right shapes, and no others.
    """

    files: LayerFiles
    layers: Mapping[int, Sequence[Mapping[str, torch.Tensor]]]  # index -> content of the file of each rank
    layout: PeerLayout
    model: ModelConfig
    qkv_order: str
    rules: list[tuple[TensorRule, ...]] = field(init=False)
    sources: dict[str, Source] = field(init=False)  # by our name

    def __post_init__(self) -> None:
        self.rules = rules_by_module_tensors(self.model)
        self.sources = dict(self._find_sources())
        self._check()

    def _find_sources(self) -> Iterable[tuple[str, Source]]:
        for ours, parameter, layer, block in self.model.placed_parameters():
            kind = "embedding norm" if layer.class_name == "EmbeddingNorm" else layer.kind
            known = kind != "block" or block < self.layout.num_blocks
            place = self.layout.place(kind, block, parameter.name, gated=self.model.gated_mlp) if known else None
            if place is None:
                what = f"{parameter.name} of block {block}" if kind == "block" else f"the {kind}"
                raise ConfigError(f"{self.files.folder}: {what}", problem="the model of the config.json has this "
                                  "parameter, and the checkpoint does not", remedy=_OTHER_MODEL)
            yield ours, Source(parameter, place, kind)

    @cached_property
    def ranks(self) -> tuple[RankStates, ...]:
        """The optimizer's part of each mp rank; () without an optimizer."""
        return read_ranks(self.files, self.layers, self.layout)

    @cached_property
    def _places(self) -> dict[tuple[Key, int], list[tuple[RankStates, str]]]:
        """For a key and a tensor-parallel rank: mp rank and name in it, for each pipeline stage that has a copy."""
        found: dict[tuple[Key, int], list[tuple[RankStates, str]]] = {}
        for number, rank in enumerate(self.ranks):
            for name in rank.shapes:
                key = key_of(name, self.layout)
                if key is None or key[1] not in self.layout.names.get(key[0], ()):
                    raise ConfigError(f"{self.files.mp_ranks[number]}: param_shapes: {shorten(name)}",
                                      problem="no layer file has this parameter",
                                      remedy="copy all files of one checkpoint")
                found.setdefault((key, number % self.files.tensor_parallel_size), []).append((rank, name))
        return found

    @property
    def states(self) -> tuple[str, ...]:
        """Optimizer states with a number for each weight."""
        return self.ranks[0].states if self.ranks else ()

    @property
    def precision(self) -> str:
        """Precision of the model's weights."""
        dtype = self.layers[self.layout.embedding][0]["word_embeddings.weight"].dtype
        return precision_of_dtype(dtype)

    def _check(self) -> None:
        """Compare names and shapes of all parts with the model's. Raises ConfigError."""
        used = {source.place.key for source in self.sources.values()}
        for index, names in self.layout.names.items():
            for name in sorted(names - {key[1] for key in used if key[0] == index}):
                raise ConfigError(f"{self.files.path(index, 0)}: {shorten(name)}", problem="the checkpoint has this "
                                  "parameter, and the model of the config.json does not", remedy=_OTHER_MODEL)
        for source in self.sources.values():
            self._check_shapes(source)

    def _check_shapes(self, source: Source) -> None:
        (index, name), ranks = source.place.key, self.files.tensor_parallel_size
        for rank in range(ranks):
            where = f"{self.files.path(index, rank)}: {name}"
            found = tuple(self.layers[index][rank][name].shape)
            rows = len(self.layers[index][0][name]) * ranks if source.kind in _VOCABULARY else 0
            if rows and rows < self.model.vocab_size:
                raise ConfigError(where, found=f"{rows} rows in the parts of all ranks", expected="at least "
                                  f"{self.model.key('vocab_size')} {self.model.vocab_size}", remedy=_OTHER_MODEL)
            expected = part_shape(source.parameter, ranks, is_half=source.place.half is not None, vocab_rows=rows)
            if found != expected:
                parts = f"{ranks} parts of {list(source.parameter.shape)}"
                raise ConfigError(where, found=f"a part of shape {list(found)}", remedy=_OTHER_MODEL, expected=parts
                                  if expected is None else f"{list(expected)}, of {parts}")
            if self.ranks:
                copies = self._places.get(((index, name), rank), [])
                if not copies or any(other.shapes[full] != found for other, full in copies):
                    raise ConfigError(where, problem="the optimizer has no parameter of this shape for it",
                                      remedy="copy all files of one checkpoint")

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a complete tensor under transformers' name, in fp32. Raises ConfigError."""
        return read_in_module(name, self.rules, self.model, lambda ours: self._ours(ours, state))

    def _ours(self, name: str, state: str) -> torch.Tensor:
        """Return a complete parameter of ours."""
        source = self.sources[name]
        parts = [self._part(source, rank, state) for rank in range(self.files.tensor_parallel_size)]
        if source.parameter.split_dim is None:
            total = torch.stack(parts)
            return total.sum(0) if self._is_summed(source) and state == FP32 else \
                parts[0] if self._are_equal(parts) else total.mean(0)
        if source.parameter.name.startswith("attention.qkv."):
            return merge_qkv(parts, self.model, self.qkv_order)
        merged = merge(parts, source.parameter, half=source.place.half)
        return merged[:self.model.vocab_size] if source.kind in _VOCABULARY else merged

    @staticmethod
    def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
        return all(torch.equal(part, parts[0]) for part in parts[1:])

    def _part(self, source: Source, rank: int, state: str) -> torch.Tensor:
        """Return the part of one tensor-parallel rank. Master weights are compared with the layer file."""
        (index, name), path = source.place.key, self.files.path(source.place.key[0], rank)
        weights = self.layers[index][rank][name]
        if not self.ranks:
            return weights.float()
        copies = self._places[(index, name), rank]
        part = copies[0][0].read(copies[0][1], state)
        if state != FP32:
            return part
        if not torch.equal(part.to(weights.dtype), weights):
            raise ConfigError(f"{path}: {name}", problem=f"it is not the rounded master weight in {copies[0][0].path}",
                              remedy="copy all files of one checkpoint, or use another one")
        # only this parameter of a tied embedding is synchronized (deepspeed/runtime/pipe/module.py, tied_weight_attr)
        for other, full in copies[1:] if name == "word_embeddings.weight" else []:
            if not torch.equal(other.read(full, state), part):
                raise ConfigError(f"{other.path}: {full}", problem="the tied embedding of this pipeline stage differs "
                                  f"from the one in {copies[0][0].path}", remedy="use another checkpoint")
        return part

    def _is_summed(self, source: Source) -> bool:
        return self.layout.program == NEOX and self.model.parallel_residual and source.parameter.name in _SUMMED \
            and self.files.tensor_parallel_size > 1

    def omissions(self) -> list[Omission]:
        """Return what merging the tensor-parallel parts loses."""
        summed = [name for name, source in self.sources.items() if self._is_summed(source)]
        found = []
        ranks = self.files.tensor_parallel_size
        if summed:
            found.append(Omission("other_states", f"GPT-NeoX has {ranks} summands of {len(summed)} biases, one on each "
                              f"tensor-parallel rank, and each is updated: their sum learns {ranks} times as fast as "
                              "the one bias here"))
        differing = self._differing_copies()
        if differing:
            largest = max(differing.values())
            found.append(Omission("other_states", f"the copies of {len(differing)} parameters on tensor-parallel ranks "
                              f"differ by up to {largest:.2g}, and their mean is taken, as GPT-NeoX's "
                              "convert_neox_to_hf.py does"))
        return found

    def _differing_copies(self) -> dict[str, float]:
        """Return name -> largest difference of copies that should be equal on all tensor-parallel ranks."""
        found = {}
        for name, source in self.sources.items():
            if source.parameter.split_dim is None and not self._is_summed(source):
                parts = [self._part(source, rank, FP32) for rank in range(self.files.tensor_parallel_size)]
                if not self._are_equal(parts):
                    found[name] = max(float((part - parts[0]).abs().max()) for part in parts)
        return found

    def notes(self) -> list[str]:
        """Return what users should know about the tensors."""
        found = []
        rows = sum(len(part["word_embeddings.weight"]) for part in self.layers[self.layout.embedding])
        key, size = self.model.key("vocab_size"), self.model.vocab_size
        if rows > size:
            found.append(f"{rows - size} of the {rows} rows of the vocabulary pad it, and are left out; "
                         f"{self.layout.program} has their logits in its loss")
        elif rows == size:
            found.append(f"{key} is {size}, with the rows that may pad the vocabulary: their logits are in the loss of "
                         f"{self.layout.program}")
        return found

    def weight_decay(self) -> dict[str, float]:
        """Return the weight decay of each parameter under transformers' name; {} if it is not recorded."""
        found: dict[str, float] = {}
        for rules in self.rules if self.ranks else []:
            for name in module_shapes(rules, self.model):
                states, full = self._places[self.sources[rules[0].ours].place.key, 0][0]
                if "weight_decay" not in states.group(full):
                    return {}
                found[name] = float(states.group(full)["weight_decay"])
        return found


def read(folder: Path, config: Mapping[str, Any] | None) -> ForeignRun:
    """Return what a checkpoint folder holds. Raises ConfigError.

    Args:
        config: content of a config.json; None: it is made from the settings in the checkpoint. If its vocab_size is
            below the number of rows of the embedding, the other rows are taken for padding and left out.
    """
    files = find_files(folder)
    state = load(files.mp_ranks[0])
    check_counts(files, state)
    step = read_step(files)
    layers = load_layers(files)
    layout = find_layout({index: parts[0].keys() for index, parts in layers.items()}, str(folder))
    settings = read_settings(folder, state, layout.program)
    values = dict(config) if config is not None else _config(settings, layout, layers, folder)
    model = model_config_from(values, "config.json" if config is not None else settings.where)
    tensors = Tensors(files, layers, layout, model, _qkv_order(layout, settings, model))
    run = _run(tensors, step, values)
    return with_states(run, state, settings, next(iter(tensors.ranks), None), files)


def _run(tensors: Tensors, step: int, values: dict[str, Any]) -> ForeignRun:
    files, ranks = tensors.files, tensors.files.tensor_parallel_size
    zero = f", ZeRO over {len(files.zero[0])}" if files.zero else ""
    stages = f"{len(files.mp_ranks) // ranks} pipeline stages" if files.layers else "no pipeline"
    return ForeignRun(
        program=f"{tensors.layout.program}, {stages}, tensor parallelism {ranks}{zero}",
        folder=files.folder, files=files.all(), config=values, shapes=shapes_in_module(tensors.rules, tensors.model),
        read=tensors.read, states=tensors.states, step=step, weight_decay=tensors.weight_decay(),
        precision=tensors.precision, omissions=tuple(tensors.omissions()), notes=tuple(tensors.notes()))


def _config(settings: Settings, layout: PeerLayout, layers: Mapping[int, Sequence[Mapping[str, torch.Tensor]]],
            folder: Path) -> dict[str, Any]:
    """Return a config.json for the settings in the checkpoint. Raises ConfigError if there are none."""
    if settings.values is None:
        raise ConfigError(str(folder), problem=f"the checkpoint does not describe its model: {settings.where} is "
                          "missing", remedy="name the model's config.json by --model")
    down = layout.place("block", 0, "mlp.down.weight", gated=False)
    if down is None:
        raise ConfigError(str(folder), found=f"{', '.join(sorted(layout.names[layout.first_block]))} in layer "
                          f"{layout.first_block}", expected="a block with an MLP")
    make = neox_config if layout.program == NEOX else megatron_config
    vocab_size = sum(len(part["word_embeddings.weight"]) for part in layers[layout.embedding])
    inner = sum(part[down.key[1]].shape[-1] for part in layers[down.key[0]])
    values = make(settings.values, settings.where, vocab_size=vocab_size, intermediate_size=inner)
    if (found := settings.values.get("num_layers")) != layout.num_blocks:
        raise ConfigError(f"{settings.where}: num_layers", found=found, expected=f"{layout.num_blocks}, the number of "
                          "blocks in the checkpoint", remedy="copy all files of the checkpoint")
    return values


def _qkv_order(layout: PeerLayout, settings: Settings, model: ModelConfig) -> str:
    """Return the order of the rows of query_key_value, see names.py. Raises ConfigError if it is unknown."""
    if layout.program == NEOX:
        return BY_HEAD if model.num_kv_heads == model.num_heads else BY_PART
    if settings.values is None:
        raise ConfigError(settings.where, problem="the checkpoint has no args, by which the order of query_key_value "
                          "is known", remedy="convert it with a tool of the program that wrote it, and use --init_from")
    return BY_PART if "ds_sequence_parallel_fpdt" in settings.values else BY_HEAD
