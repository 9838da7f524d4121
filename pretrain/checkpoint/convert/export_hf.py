"""Export a checkpoint of any layout as a folder that transformers loads. At most one tensor is in memory."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pretrain.checkpoint.convert.new_folder import check_free_space, fill_new_folder
from pretrain.checkpoint.convert.plan_export import ExportPlan, model_card
from pretrain.checkpoint.convert.write_weights import (
    CHUNK_NUMEL,
    PlannedTensor,
    copy_rows,
    index_json,
    shards_of,
    write_shards,
)
from pretrain.checkpoint.format.hashed_files import FileRecord
from pretrain.checkpoint.format.shard_index import FP32
from pretrain.checkpoint.load.hf_folder import INDEX
from pretrain.checkpoint.load.reader import CheckpointReader, all_finite, chunks_of
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.special_tokens import CONFIG_KEYS, TokenIds
from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig
from pretrain.model.hf_names import TensorRule, tensor_rules
from pretrain.model.hf_weights import is_concatenation, our_rows_in_their_order
from pretrain.model.implementation import ToFiles
from pretrain.model.own_models import own_model
from pretrain.model.parameters import DTYPES


def export_hf(plan: ExportPlan) -> list[str]:
    """Write weights, config.json, tokenizer, generation_config.json and the model card into the new folder `plan.out`.

    Do nothing if `plan.out` is already the result of the same export. Return notes for the user. Raises ConfigError.
    """
    notes = list(plan.notes)
    _fill(plan, f"export {conversion_text(plan)}", lambda temporary: write_hf(plan, temporary, notes))
    return notes


def conversion_text(plan: ExportPlan) -> str:
    """Describe the options of an export, by which its output is recognized."""
    tokenizer = plan.tokenizer.fingerprint if plan.tokenizer else None
    return f"{plan.dtype}, files of {plan.shard_bytes} bytes, tokenizer {tokenizer}"


def write_hf(plan: ExportPlan, folder: Path, notes: list[str]) -> dict[str, FileRecord]:
    """Write all files of an export into an existing folder, and add to `notes`. Return the records of the weights."""
    write_config(plan, folder, None)  # transformers chooses the tokenizer's class by it: see export_tokenizer
    if plan.tokenizer is not None:
        ids = export_tokenizer(plan.tokenizer.name, folder, max_length=plan.config.max_positions)
        write_config(plan, folder, ids)
        notes.extend(ids.notes)
    _write_json(folder / "generation_config.json", _generation_config(folder))
    (folder / "README.md").write_text(model_card(plan), encoding="utf-8")
    return _write_weights(plan, folder)


def consolidate(plan: ExportPlan) -> None:
    """Write only weights and config.json into the new folder `plan.out`. Raises ConfigError."""
    def write(temporary: Path) -> dict[str, FileRecord]:
        write_config(plan, temporary, plan.tokenizer.ids if plan.tokenizer else None)
        return _write_weights(plan, temporary)

    _fill(plan, f"consolidate {plan.dtype}", write)


def _fill(plan: ExportPlan, conversion: str, write: Callable[[Path], dict[str, FileRecord]]) -> None:
    if not plan.out.exists():
        check_free_space(plan.out, plan.num_bytes)
    fill_new_folder(plan.folder, plan.out, conversion, write)


def write_config(plan: ExportPlan, folder: Path, ids: TokenIds | None) -> None:
    """Write config.json with the special tokens `ids` of the tokenizer; None: with the ones in the model's config.

    Ids that are unknown are written as null: for a missing key, transformers would use the family's default id.
    """
    config = plan.config
    values = {key: value for key, value in config.hf_config.items()
              if not key.startswith("_") and key != "auto_map"}  # auto_map names Python files, which are not exported
    known = {key: values[key] for key in CONFIG_KEYS if _are_tokens(values.get(key), config)}
    if ids is None:
        values |= dict.fromkeys(CONFIG_KEYS) | known
    else:
        values |= ids.config_keys()
        # Several tokens may end a text. Such a list is kept if it has the tokenizer's own token.
        values |= {key: tokens for key, tokens in known.items() if isinstance(tokens, list) and values[key] in tokens}
    dtype = str(DTYPES[plan.dtype]).removeprefix("torch.")
    own = own_model(config.architecture)
    _write_json(folder / "config.json", {
        **values, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.architecture] if own is None else
                                    own.model_class.__name__],
        "dtype": dtype, "torch_dtype": dtype,  # the second is its name in transformers before 4.56
        "transformers_version": transformers.__version__})
    config_class = transformers.AutoConfig if own is None else own.config_class
    config_class.from_pretrained(folder)  # raises an error now rather than when the user loads the model


def _are_tokens(value: Any, config: ModelConfig) -> bool:
    """Return whether a value of config.json is a token or a list of tokens."""
    tokens = value if isinstance(value, list) else [value]
    return all(type(token) is int and 0 <= token < config.vocab_size for token in tokens)


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json: the special tokens of the config.json in `folder`."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = {key: values[key] for key in CONFIG_KEYS if values[key] is not None}
    return {"_from_model_config": True, **known, "transformers_version": transformers.__version__}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(plan: ExportPlan, folder: Path) -> dict[str, FileRecord]:
    """Write safetensors files, with an index if there are several. Return sizes and hashes of the safetensors files.

    A tied head is written once, as the embedding. Raises ConfigError if the checkpoint does not fit the model or a
    value is not finite in this dtype, and OSError.
    """
    reader, rules = CheckpointReader(plan.folder), tensor_rules(plan.config)
    reader.check_shapes({rule.ours: rule.shape for rule in rules})
    converter = _Converter(reader, plan.config, DTYPES[plan.dtype])
    groups = list(plan.config.implementation.to_files(plan.config, plan.dtype))
    planned = [PlannedTensor(name, dtype, shape) for group in groups for name, (dtype, shape) in group.targets.items()]
    shards = shards_of(planned, plan.shard_bytes, "model")
    records = write_shards(folder, shards, (chunk for group in groups for chunk in converter.chunks(group)))
    if len(shards) > 1:
        (folder / INDEX).write_text(index_json(shards))
    return records


class _Converter:
    """Yields the values of a checkpoint in the order of transformers' tensors.

    All tensors share two buffers: a chunk, and the largest tensor that must be reordered. Buffers for each tensor would
    need several times the memory, because the C library keeps freed blocks of up to 32 MB.
    """

    def __init__(self, reader: CheckpointReader, config: ModelConfig, dtype: torch.dtype) -> None:
        self._reader, self._config = reader, config
        self._chunk = torch.empty(CHUNK_NUMEL, dtype=dtype)
        reordered = (prod(rule.shape) for rule in tensor_rules(config) if not is_concatenation(rule))
        self._tensor = torch.empty(max(reordered, default=0), dtype=dtype)
        self._rules = {rule.theirs[0]: rule for rule in tensor_rules(config)}
        self._buffers = {theirs: ours for ours, theirs, _ in config.named_buffers()}

    def chunks(self, group: ToFiles) -> Iterator[torch.Tensor]:
        """Yield the flat values of `group.targets`. If they are converted, all of the group are in memory."""
        if group.rule is not None:
            yield from self._of_rule(group.rule)
        if group.convert is not None:
            for tensor in group.convert({name: self._complete(name) for name in group.sources}):
                yield tensor.reshape(-1)

    def _complete(self, name: str) -> torch.Tensor:
        """Return a complete parameter of transformers' model in the dtype of the export, or a buffer in fp32."""
        if name in self._buffers:
            return self._reader.buffers()[self._buffers[name]].float()
        rule = self._rules[name]
        return self._read(rule.ours, 0, torch.empty(rule.shape, dtype=self._chunk.dtype))

    def _of_rule(self, rule: TensorRule) -> Iterator[torch.Tensor]:
        """Yield the flat values of `rule.theirs`. The next chunk overwrites the last one."""
        if is_concatenation(rule):
            first = 0
            for shape in rule.their_shapes():
                for start, length in chunks_of(prod(shape), CHUNK_NUMEL):
                    yield self._read(rule.ours, first + start, self._chunk.narrow(0, 0, length))
                first += prod(shape)
            return
        flat = self._tensor.narrow(0, 0, prod(rule.shape))
        for start, length in chunks_of(flat.numel(), CHUNK_NUMEL):
            self._read(rule.ours, start, flat.narrow(0, start, length))
        yield from self._reordered(rule, flat.view(rule.shape[0], -1))

    def _reordered(self, rule: TensorRule, ours: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of `rule.theirs` in chunks. No chunk has values of two tensors."""
        order = our_rows_in_their_order(rule, self._config)
        if rule.transposed:
            yield from copy_rows(ours.t(), self._chunk, order, dim=1)
        else:
            assert order is not None, rule.ours  # otherwise the tensor is a concatenation
            for rows in order.split(rule.their_rows or rule.shape[0]):
                yield from copy_rows(ours, self._chunk, rows)

    def _read(self, name: str, start: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with values of a parameter. Raises ConfigError if one is not finite in the dtype of `out`."""
        self._reader.copy(name, FP32, start, out)
        if not all_finite(out):
            if all_finite(self._reader.read(name, FP32, start, out.numel())):
                raise ConfigError("--dtype", problem=f"{name} has values that are too large for {out.dtype}",
                                  remedy="choose bf16 or fp32")
            raise ConfigError(f"{self._reader.folder}: {name}", problem="it has values that are NaN or infinite",
                              remedy="use an earlier checkpoint")
        return out
