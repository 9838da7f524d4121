"""Export a checkpoint of any layout as a folder that transformers loads."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pretrain.checkpoint.convert.model_card import model_card
from pretrain.checkpoint.convert.new_folder import check_free_space, fill_new_folder
from pretrain.checkpoint.convert.plan_export import ExportPlan
from pretrain.checkpoint.convert.write_hf_weights import write_hf_weights
from pretrain.checkpoint.format.files import FileRecord
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.data.export_tokenizer import export_tokenizer
from pretrain.data.special_tokens import TokenIds
from pretrain.model.config import ModelConfig

_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_hf(plan: ExportPlan) -> list[str]:
    """Write weights, config.json, tokenizer, generation_config.json and the model card into the new folder `plan.out`.

    Do nothing if `plan.out` is already the result of the same export. Return notes for the user. Raises ConfigError.
    """
    notes = list(plan.notes)

    def write(temporary: Path) -> dict[str, FileRecord]:
        write_config(plan, temporary, None)
        ids: TokenIds | None = None
        if plan.tokenizer is not None:
            ids = export_tokenizer(plan.tokenizer.path, temporary, max_length=plan.config.max_positions)
            write_config(plan, temporary, ids)
            notes.extend(ids.notes)
        _write_json(temporary / "generation_config.json", _generation_config(temporary))
        (temporary / "README.md").write_text(model_card(plan), encoding="utf-8")
        return _write_weights(plan, temporary)

    tokenizer = plan.tokenizer.fingerprint if plan.tokenizer else None
    _fill(plan, f"export {plan.dtype}, files of {plan.shard_bytes} bytes, tokenizer {tokenizer}", write)
    return notes


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


def _write_weights(plan: ExportPlan, folder: Path) -> dict[str, FileRecord]:
    return write_hf_weights(CheckpointReader(plan.folder), plan.config, folder, dtype=plan.dtype,
                            shard_bytes=plan.shard_bytes)


def write_config(plan: ExportPlan, folder: Path, ids: TokenIds | None) -> None:
    """Write config.json. `ids` are the special tokens of the tokenizer; None without a tokenizer.

    All three ids are written: for a missing one, transformers would use the id of the family's own tokenizer.
    """
    config = plan.config
    values = {key: value for key, value in config.hf_config.items()
              if not key.startswith("_") and key != "auto_map"}  # auto_map names Python files, which are not exported
    known = {key: values[key] for key in _TOKEN_KEYS if _are_tokens(values.get(key), config)}
    values |= _token_keys(ids) if ids is not None else dict.fromkeys(_TOKEN_KEYS)
    values |= {key: value for key, value in known.items()
               if ids is None or (isinstance(value, list) and values[key] in value)}  # several ends of a text
    dtype = _TORCH_DTYPES[plan.dtype]
    _write_json(folder / "config.json", {
        **values, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.architecture]],
        "dtype": dtype, "torch_dtype": dtype,  # the second is its name in transformers before 4.56
        "transformers_version": transformers.__version__})
    transformers.AutoConfig.from_pretrained(folder)  # raises an error now rather than when the user loads the model


def _are_tokens(value: Any, config: ModelConfig) -> bool:
    """Return whether a value of config.json is a token or a list of tokens."""
    tokens = value if isinstance(value, list) else [value]
    return all(type(token) is int and 0 <= token < config.vocab_size for token in tokens)


def _token_keys(ids: TokenIds) -> dict[str, int | None]:
    return dict(zip(_TOKEN_KEYS, (ids.bos, ids.eos, ids.pad), strict=True))


def _generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of generation_config.json: the special tokens of the config.json in `folder`."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = {key: values[key] for key in _TOKEN_KEYS if values[key] is not None}
    return {"_from_model_config": True, **known, "transformers_version": transformers.__version__}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
