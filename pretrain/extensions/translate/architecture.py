"""Find the family of models that computes what another program's settings describe, and write its config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from pretrain.errors import ConfigError
from pretrain.extensions.translate.parts import Result
from pretrain.extensions.translate.settings import Settings
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES

Wanted = dict[str, tuple[Any, str]]  # field of ModelConfig -> its value, and the settings that give it
Fields = Mapping[str, Any]  # field of ModelConfig -> value

GPT2_TOKENS = 50257
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu", "relu2": "relu2"}
_DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")
# keys of a config.json whose values are no fields of ModelConfig; a family has one theta key and one fraction key
_THETA, _FRACTION = ("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")
# several families compute some models: the first one that does is chosen, in this order, and then others
_ARCHITECTURES = {"gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel",
                  "bloom": "BloomForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                  "qwen3": "Qwen3ForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
                  "stablelm": "StableLmForCausalLM", "mpt": "MptForCausalLM", "mixtral": "MixtralForCausalLM"}
_WORDS = {"norm_bias": "biases of norms", "qkv_bias": "biases of queries, keys and values",
          "attention_out_bias": "a bias of the attention's output", "mlp_bias": "biases of the MLP",
          "gated_mlp": "a gated MLP", "parallel_residual": "attention and MLP side by side",
          "tie_word_embeddings": "tied embeddings", "embedding_norm": "a norm of the embeddings"}


def write_model(settings: Settings, result: Result, wanted: Wanted, is_listed: Callable[[str], bool]) -> None:
    """Write the config.json of the first family that computes the wanted model.

    is_listed: whether a setting of `wanted` gets a row. Dropouts for which the family has no key become flags.
    Raises ConfigError if no family computes the model.
    """
    fields = {name: value for name, (value, _) in wanted.items() if name not in _DROPOUTS}
    dropouts = {name: value for name, (value, _) in wanted.items() if name in _DROPOUTS}
    closest: tuple[int, str] | None = None
    for family in dict.fromkeys((*_ARCHITECTURES, *FAMILIES)):
        config = {**_config(family, fields), **_dropouts(family, dropouts)}
        try:
            model = model_config_from(config, f"{settings.program_name}: model")
        except ConfigError as error:
            problems = [str(error)]
            if closest is None and not _sizes_fit(fields):
                raise
        else:
            problems = [_problem(name, value, getattr(model, name)) for name, value in fields.items()
                        if getattr(model, name) != value]
        if not problems:
            _write(family, config, model, result, {field: (value, [name for name in names.split() if is_listed(name)])
                                                   for field, (value, names) in wanted.items()})
            return
        if closest is None or len(problems) < closest[0]:
            closest = len(problems), f"the most similar one, {family}, differs: {'; '.join(problems)}"
    raise ConfigError(f"{settings.program_name}: model", problem="no family of models here computes it; "
                      f"{closest[1] if closest else ''}",
                      remedy="change the settings that differ, or give a config.json of another family to --model")


def _sizes_fit(fields: Fields) -> bool:
    """Return whether the heads divide the hidden size: if not, every family fails in the same way."""
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    return bool(heads and kv_heads and fields["head_size"] and heads % kv_heads == 0)


def _config(name: str, fields: Fields) -> dict[str, Any]:
    """Return a config.json of a family with as many of the wanted fields as its keys can say."""
    family = FAMILIES[name]
    config: dict[str, Any] = {"model_type": name}
    for field, value in fields.items():
        key = family.key_names.get(field, field)
        if field in ("rope_theta", "rope_scaling", "rotary_size", "windows") or key not in family.keys:
            continue
        config[key] = _ACTIVATIONS.get(value, value) if field == "activation" else value
    if fields["position"] == "rope":
        config.update(_rotary(name, fields))
    if fields.get("windows") and "sliding_window" in family.keys:
        config["sliding_window"] = max(fields["windows"])
        if "use_sliding_window" in family.keys:
            config |= {"use_sliding_window": True, "max_window_layers": 0}
    elif "sliding_window" in family.keys:
        config["sliding_window"] = None
    if config.get("head_dim") == fields["hidden_size"] // max(fields["num_heads"], 1):
        del config["head_dim"]
    return {"architectures": [_ARCHITECTURES[name]], **config} if name in _ARCHITECTURES else config


def _rotary(name: str, fields: Fields) -> dict[str, Any]:
    family = FAMILIES[name]
    config = {key: fields["rope_theta"] for key in _THETA if key in family.keys and family.keys[key] is not None}
    fraction = fields["rotary_size"] / fields["head_size"] if fields["head_size"] else 1.0
    own = family.key_names.get("rotary_size", "")
    if own in _FRACTION:
        config[own] = fraction
    elif own in family.keys:
        config[own] = fields["rotary_size"]
    if fields.get("rope_scaling") and "rope_scaling" in family.keys:
        config["rope_scaling"] = dict(fields["rope_scaling"])
    return config


def _dropouts(name: str, wanted: Fields) -> dict[str, Any]:
    """Return the dropouts that a family has as keys."""
    family = FAMILIES[name]
    keys = {field: family.key_names.get(field, field) for field in _DROPOUTS}
    return {key: wanted[field] for field, key in keys.items() if key in family.keys and field in wanted}


def _problem(name: str, wanted: Any, found: Any) -> str:
    if isinstance(wanted, bool) and name in _WORDS:
        return f"it has {'no ' if wanted else ''}{_WORDS[name]}"
    if name == "windows":
        found, wanted = (max(each) if each else "no limit" for each in (found, wanted))
    return f"{name} is {found}, and not {wanted}"


def _write(family: str, config: dict[str, Any], model: ModelConfig, result: Result,
           wanted: Mapping[str, tuple[Any, list[str]]]) -> None:
    """Write the config.json, and the flags of dropouts that it has no key for."""
    result.model.update(config)
    for name, (value, names) in wanted.items():
        key = model.key(name)
        if key in config:
            result.set_model(key, config[key], *names)
        elif name in _DROPOUTS:
            if value:
                result.set_run(name, value, *names)
            else:
                result.used("no dropout", *names)
        elif names:
            shown = {"rope_theta": next((f"{key}: {config[key]}" for key in _THETA if key in config), "")}.get(name)
            result.used(f"config.json {shown}" if shown else f"family {family}", *names)


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def padded_vocabulary(tokens: int | None, multiple: int, tokenizer: str = "") -> int:
    """Return the rows of the embedding. `tokenizer`: its name in the error if `tokens` is None."""
    if tokens is None:
        raise ConfigError("--vocab_size", problem="the input does not say how many tokens the tokenizer has"
                          f"{tokenizer}", remedy="give their number, before padding")
    return padded(tokens, multiple)


def qk_norm(settings: Settings, name: str, norm: str, remedy: str) -> str:
    """Return the kind of the norm of queries and keys that a switch turns on. Raises ConfigError for a LayerNorm."""
    if settings.is_on(name) and norm != "rmsnorm":
        raise ConfigError(settings.where(name), problem="no family here has a LayerNorm of queries and keys",
                          remedy=f"{remedy} has a counterpart")
    return "head" if settings.is_on(name) else ""
