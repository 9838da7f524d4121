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
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.special_tokens import CONFIG_KEYS, TokenIds
from pretrain.model.config import ModelConfig
from pretrain.model.parameters import DTYPES


def export_hf(plan: ExportPlan) -> list[str]:
    """Write weights, config.json, tokenizer, generation_config.json and the model card into the new folder `plan.out`.

    Do nothing if `plan.out` is already the result of the same export. Return notes for the user. Raises ConfigError.
    """
    notes = list(plan.notes)

    def write(temporary: Path) -> dict[str, FileRecord]:
        write_config(plan, temporary, None)  # transformers chooses the tokenizer's class by it: see export_tokenizer
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
    """Write config.json with the special tokens `ids` of the tokenizer; None: with those of the model's config.

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
    _write_json(folder / "config.json", {
        **values, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.architecture]],
        "dtype": dtype, "torch_dtype": dtype,  # the second is its name in transformers before 4.56
        "transformers_version": transformers.__version__})
    transformers.AutoConfig.from_pretrained(folder)  # raises an error now rather than when the user loads the model


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
