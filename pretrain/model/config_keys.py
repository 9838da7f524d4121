"""Check the keys of a transformers config.json: types, unknown keys, and values that are not implemented.

families/ has the keys of each family. config.py builds a ModelConfig from them. Imports no torch: runs are validated
before torch is imported.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.model.families import FAMILIES
from pretrain.model.families.position_keys import PREFERABLY_NESTED
from pretrain.stored_json import parse_json, read_settings

# Types of the keys whose default in a family is None. In this family, they may be null.
NULLABLE: dict[str, type] = {
    "n_inner": int, "num_key_value_heads": int, "head_dim": int, "rope_theta": float, "partial_rotary_factor": float,
    "rope_scaling": dict, "rope_parameters": dict,
    "hidden_act": str, "hidden_activation": str, "layer_types": list, "sliding_window": int,
    "sliding_window_size": int,
    "final_logit_softcapping": float, "hidden_size": int, "n_head": int, "n_layer": int, "n_embed": int,
    "num_attention_heads": int, "num_hidden_layers": int, "attn_config": dict,
    "mlp_only_layers": list, "num_local_experts": int,
}

# Keys that change the model in ways that are not implemented. Only these values, which change nothing, are accepted.
# A family may have more of them (Family.fixed).
FIXED: dict[str, Any] = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False, "pretraining_tp": 1, "quantization_config": None, "sliding_window": None,
    "use_sliding_window": False, "is_encoder_decoder": False, "tie_encoder_decoder": False, "pruned_heads": {},
    "layer_types": None, "cross_attention_hidden_size": None, "chunk_size_feed_forward": 0, "rope_interleaved": False,
    "per_layer_config": None,
}

# Keys that do not change the trained model: generation, classification heads, metadata.
IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version name_or_path finetuning_task tokenizer_class
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    bad_words_ids begin_suppress_tokens suppress_tokens use_cache is_decoder gradient_checkpointing output_attentions
    output_hidden_states output_scores return_dict return_dict_in_generate use_return_dict torchscript use_bfloat16
    tf_legacy_loss id2label label2id num_labels problem_type task_specific_params prefix classifier_dropout
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout n_ctx
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size remove_invalid_values
    num_return_sequences exponential_decay_length_penalty cache_implementation
    is_llama_config transformers.js_config unsloth_fixed unsloth_version max_sequence_length
    """.split()  # noqa: SIM905 (readable)
)


# Upper limits of numbers in a config.json without a family here, by their keys. They are far beyond any model, and
# bound the time and memory in which transformers builds its modules: 1,000 layers take half a minute.
_LIMITS = tuple((re.compile(pattern), limit) for pattern, limit in (
    ("num_hidden_layers|n_layers?|num_layers|num_blocks|(num_)?(decoder|encoder)_layers", 1000),
    (".*vocab_size|.*(intermediate|ffn|mlp).*", 2**24),
    ("max_position_embeddings|n_positions|max_seq(uence)?_len.*", 2**27), (".*experts", 2**14),
    (".*hidden_size|n_embd|d_model|emb_dim|.*embedding_size|.*head_dim|.*heads?|.*rank|.*groups|.*kernel.*", 2**20)))
_KERNELS = re.compile(r"_?\w+_implementation")  # keys that may name a repository, whose code transformers would run


class NotTrainedHereError(ConfigError):
    """A config.json of a model that this program does not train. transformers may know it, and generate with it."""


def check_values(values: dict[str, Any], where: str) -> None:
    """Raise ConfigError for NaN, and for the name of a repository with code: no config.json of a model has these."""
    for key, value in _nested(values):
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{where}: {shorten(key)}", found="NaN", expected="a number")
        if isinstance(value, str) and _KERNELS.fullmatch(key) and not value.replace("_", "").isalnum():
            raise ConfigError(f"{where}: {shorten(key)}", found=value, expected="the name of an implementation in "
                              "transformers, such as sdpa", remedy="Remove the key: code of repositories is never run")


def check_limits(values: dict[str, Any], where: str) -> None:
    """Raise ConfigError for absurd sizes of a model without a family here."""
    for key, value in _nested(values):
        limit = next((limit for pattern, limit in _LIMITS if pattern.fullmatch(key)), None)
        if limit is not None and isinstance(value, (int, float)) and not value <= limit:
            raise ConfigError(f"{where}: {shorten(key)}", found=value, expected=f"at most {limit:,}")


def _nested(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of all numbers and texts; elements of a list have the list's key."""
    if isinstance(values, dict):
        for name, value in values.items():
            # implementations by the name of a part
            yield from _nested(value, key if _KERNELS.fullmatch(key) else name)
    elif isinstance(values, list):
        for value in values:
            yield from _nested(value, key)
    else:
        yield key, values


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json. Raises ConfigError if it is unreadable, not a JSON object, too deep, or repeats a key."""
    try:
        values = parse_json(read_settings(path))
    except UnicodeDecodeError:
        raise ConfigError(str(path), problem="it is not UTF-8 text, as a transformers config.json is",
                          remedy="name a config.json; --init_from starts from the weights of a folder") from None
    except OSError as error:
        raise ConfigError(str(path), problem=f"the config.json cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(str(path), problem=f"it is not a valid config.json: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(str(path), found=f"a JSON {type(values).__name__}", expected="a JSON object")
    return values


def fixed_keys(architecture: str) -> dict[str, Any]:
    """Return the keys with only one implemented value, and this value."""
    family = FAMILIES[architecture]
    return {**{key: value for key, value in FIXED.items() if key not in family.ignored}, **family.fixed}


def known_keys(architecture: str) -> set[str]:
    """Return all keys that a config.json of this architecture may have."""
    family = FAMILIES[architecture]
    return set(family.keys) | set(fixed_keys(architecture)) | IGNORED | family.ignored


def _may_be_null(key: str, architecture: str) -> bool:
    family = FAMILIES[architecture]
    return family.keys.get(key) is None or key in family.nullable or key in PREFERABLY_NESTED


def own_key(word: str, architecture: str) -> str:
    """Return this architecture's key with the meaning of `word`, a key of any architecture; else `word` itself."""
    meanings = [word, *(ours for family in FAMILIES.values()
                 for ours, theirs in family.key_names.items() if theirs == word)]
    for meaning in meanings:
        own = FAMILIES[architecture].key_names.get(meaning, meaning)
        if own != word and own in FAMILIES[architecture].keys:
            return own
    return word


def check_model_keys(values: dict[str, Any], architecture: str, where: str) -> None:
    """Raise ConfigError for unknown keys, and for keys in FIXED with a value that is not implemented."""
    known, fixed = known_keys(architecture), fixed_keys(architecture)
    for key, value in values.items():
        if key not in known and not key.startswith("_"):
            raise NotTrainedHereError(
                f"{where}: {shorten(key)}", problem=f"this is not a key of a {architecture} config",
                remedy="Remove it if it does not change the model", word=own_key(key, architecture),
                known=FAMILIES[architecture].keys)
        if key in FAMILIES[architecture].keys:
            continue
        if key in fixed and value is not None and (value != fixed[key] or isinstance(value, bool) !=
                                                   isinstance(fixed[key], bool)):
            raise NotTrainedHereError(f"{where}: {key}", found=json.dumps(value),
                                      expected=f"{json.dumps(fixed[key])} (nothing else is implemented)",
                                      remedy="Remove the key, or choose a model without it")


def _type_of(key: str, architecture: str) -> type:
    """Return the type of a key's values other than null."""
    default = FAMILIES[architecture].keys.get(key, fixed_keys(architecture).get(key))
    return NULLABLE.get(key, str) if default is None else type(default)


def check_model_types(values: dict[str, Any], architecture: str, where: str) -> None:
    """Raise ConfigError for keys of the family whose value has the wrong type."""
    for key in FAMILIES[architecture].keys:
        value, wanted = values.get(key), _type_of(key, architecture)
        if key not in values or (value is None and _may_be_null(key, architecture)):
            continue
        accepted: tuple[type, ...] = (int, float) if wanted is float else (wanted,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
            raise ConfigError(f"{where}: {key}", found=json.dumps(value), expected=TYPES[wanted])
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{where}: {key}", found=value, expected="a finite number")


TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "an object: { ... }",
         list: "a list", type(None): "null"}


def parse_value(text: str, wanted: type) -> Any:
    """Parse `text` as a value of type `wanted`. Raises ValueError or KeyError for other text."""
    if wanted is bool:
        return {"true": True, "false": False}[text.lower()]
    if wanted in (int, float):
        return wanted(text)
    if wanted is str:
        return text
    raise ValueError


def split_overrides(text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of `key=value,key=value`. Raises ConfigError."""
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not key or not value:
            raise ConfigError("--model_overrides", found=repr(word), expected="key=value, separated by commas")
        yield key, value


def parse_overrides(text: str, architecture: str, current: dict[str, Any]) -> dict[str, Any]:
    """Parse `n_layer=4,vocab_size=8000` into typed values. `current` is the file's content. Raises ConfigError."""
    changed: dict[str, Any] = {}
    for key, value in split_overrides(text):
        where = f"--model_overrides {key}"
        if key not in known_keys(architecture) or key == "model_type":
            raise ConfigError(shorten(where), problem=f"this is not a key of a {architecture} config.json",
                              word=own_key(key, architecture), known=FAMILIES[architecture].keys)
        if key in changed:
            raise ConfigError(where, problem="the key is given twice")
        changed[key] = _override_value(key, value, architecture, current, where)
    return changed


def _override_value(key: str, text: str, architecture: str, current: dict[str, Any], where: str) -> Any:
    """Parse the value of an override. Raises ConfigError if it has the wrong type."""
    if text.lower() in ("none", "null") and (_may_be_null(key, architecture) or current.get(key) is None):
        return None
    if key in FAMILIES[architecture].keys or fixed_keys(architecture).get(key) is not None:
        wanted = _type_of(key, architecture)
    else:
        wanted = int if key.endswith("_id") else type(current.get(key, ""))
    try:
        return parse_value(text, wanted)
    except (ValueError, KeyError):
        if wanted not in (bool, int, float):
            raise ConfigError(where, problem=f"the value is {TYPES[wanted]}, which this flag does not read",
                              remedy="write it into a config.json") from None
        raise ConfigError(where, found=repr(text), expected=TYPES[wanted]) from None
