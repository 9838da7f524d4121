"""Read a checkpoint of GPT-NeoX or Megatron-DeepSpeed: layers of a pipeline, tensor-parallel parts, ZeRO stage 1.

layer_files.py lists the files, names.py says where each parameter is, tensor_parallel_parts.py merges its parts,
rank_states.py reads master weights and optimizer states, tensors.py has them together, and states.py and config.py read
the rest.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.foreign_run import ForeignRun
from pretrain.extensions.adopt.mapping import shapes_in_module
from pretrain.extensions.adopt.megatron.config import megatron_config, neox_config
from pretrain.extensions.adopt.megatron.layer_files import check_counts, find_files, load, load_layers
from pretrain.extensions.adopt.megatron.names import BY_HEAD, BY_PART, NEOX, PeerLayout, find_layout
from pretrain.extensions.adopt.megatron.states import Settings, read_settings, read_step, with_states
from pretrain.extensions.adopt.megatron.tensors import Tensors
from pretrain.model.config import ModelConfig, model_config_from


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
