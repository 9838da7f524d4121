"""Read a transformers config.json of any supported architecture into one dataclass.

families/ has a file for each family, with its keys and the names of its tensors. This file imports neither torch nor
transformers, so that a run is validated in well under a second.
"""

import copy
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten
from pretrain.hub import find_repository, is_repository, snapshot_in
from pretrain.model.config_keys import check_model_keys, check_model_types, parse_overrides, read_config_json
from pretrain.model.families.family import TensorRule
from pretrain.model.families.read import listing
from pretrain.model.families.table import FAMILIES

PRESETS = Path(__file__).parent / "presets"
# Upper limits, far beyond any model. They prevent lists or tables of absurd size.
_LARGEST = {"vocab_size": 2**24, "hidden_size": 2**20, "num_layers": 10**5, "num_heads": 2**20, "num_kv_heads": 2**20,
            "head_size": 2**20, "intermediate_size": 2**24, "max_positions": 2**31 - 1, "norm_eps": 1.0}
_LARGEST_TABLE = 2**24  # learned positions
# Architectures with a similar name to one in FAMILIES. They are not taken for misspellings of it.
_OTHER_ARCHITECTURES = ("gpt_neo", "llama4", "olmo", "olmo3", "qwen3_next", "gemma3n")


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are numbers of elements, dropouts are probabilities."""

    architecture: str  # model_type of the config.json, and family of the tensor names in an export
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_positions: int  # tokens
    norm: str  # "layernorm" (weight and bias) or "rmsnorm" (weight)
    norm_eps: float
    activation: str  # "gelu", "gelu_tanh", "silu", "relu" or "relu2" (relu, squared)
    gated_mlp: bool  # activation(gate(x)) * up(x) instead of activation(up(x))
    position: str  # "learned", "rope" or "alibi"
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    embedding_dropout: float
    attention_dropout: float
    residual_dropout: float
    initializer_range: float  # standard deviation of the initial matrices
    scale_residual_init: bool  # divide by sqrt(2 * num_layers) for projections into the residual stream
    hf_config: dict[str, Any]  # the config.json with overrides applied
    # norms
    norm_bias: bool = True  # of a layernorm
    norm_offset: float = 0.0  # the norm multiplies by weight + norm_offset; Gemma: 1
    pre_norm: bool = True  # norms of the inputs of attention and MLP: norm1, norm2
    post_norm: bool = False  # norms of the outputs of attention and MLP: post_norm1, post_norm2
    shared_norm: bool = False  # with parallel_residual: norm1 is also the norm of the MLP's input
    embedding_norm: bool = False  # norm of the embeddings (BLOOM)
    qk_norm: str = ""  # norm of queries and keys: "" none; "head" over each head (Qwen3); "all" over all heads (OLMo-2)
    # positions
    rope_theta: float = 0.0
    rotary_size: int = 0  # number of elements of a head that rotate, from the first; 0 without rope
    rope_scaling: dict[str, Any] | None = None  # {"rope_type": "linear" | "dynamic" | "llama3" | "yarn", ...}
    local_rope_theta: float = 0.0  # rope_theta, without scaling, of layers with a window; 0: as other layers (Gemma 3)
    windows: tuple[int, ...] = ()  # per layer: number of latest tokens that a query sees, with its own; 0: all tokens
    # residual stream, attention and logits
    parallel_residual: bool = False  # x + attention(norm1(x)) + mlp(norm2(x))
    attention_scale: float = 0.0  # factor of the attention scores; 0: 1 / sqrt(head_size)
    attention_softcap: float = 0.0  # scores become cap * tanh(scores / cap); 0: no cap (Gemma 2)
    logit_softcap: float = 0.0  # the same for the logits
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma: sqrt(hidden_size))
    head_bias: bool = False
    # mixture of experts
    num_experts: int = 0  # of each block with experts; 0: no block has any
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # inner size of one expert
    norm_topk_prob: bool = False  # divide the probabilities of a token's experts by their sum
    shared_expert_size: int = 0  # inner size of the expert that computes every token; 0: none
    shared_expert_gate: bool = False  # multiply the shared expert's output by sigmoid(gate(x))
    dense_layers: frozenset[int] = frozenset()  # in a model with experts: indices of the blocks that have an MLP
    router_aux_loss: float = 0.0  # coefficient of the load-balancing loss

    def key(self, field: str) -> str:
        """Return the config.json key of a field, such as `n_layer` for `num_layers` of gpt2."""
        return FAMILIES[self.architecture].key_names.get(field, field)

    def longest_sequence(self) -> int:
        """Return the largest sequence length in tokens: max_positions, and no limit with the rope_type "dynamic"."""
        dynamic = self.rope_scaling is not None and self.rope_scaling["rope_type"] == "dynamic"
        return 2**31 - 1 if dynamic else self.max_positions

    def window(self, index: int) -> int:
        """Return the attention window of block `index` in tokens; 0: all tokens."""
        return self.windows[index] if self.windows else 0

    def has_experts(self, index: int) -> bool:
        """Return whether block `index` has experts instead of an MLP."""
        return self.num_experts > 0 and index not in self.dense_layers

    def qk_norm_size(self, num_heads: int) -> int:
        """Return the number of elements that a norm of queries or keys with `num_heads` heads covers."""
        return self.head_size if self.qk_norm == "head" else num_heads * self.head_size

    def tensors(self) -> list[TensorRule]:
        """List all parameters with their shapes and their names in transformers, in the order of layer_specs.py."""
        return list(FAMILIES[self.architecture].tensors(self))

    def layer_tensors(self, index: int = 0) -> list[TensorRule]:
        """List the parameters of block `index`, with the names of the first block."""
        first = replace(self, num_layers=1, dense_layers=frozenset(() if self.has_experts(index) else (0,)))
        others = {rule.theirs for rule in replace(first, num_layers=0).tensors()}
        return [rule for rule in first.tensors() if rule.theirs not in others]

    def layer_parameters(self, index: int = 0, *, active: bool = False) -> int:
        """Return the number of parameters of block `index`; `active`: without the experts that a token does not use."""
        return sum(self.active_elements(rule) if active else prod(rule.shape) for rule in self.layer_tensors(index))

    def num_parameters(self, *, active: bool = False) -> int:
        """Return the number of all parameters; `active`: without the experts that a token does not use.

        A tied matrix counts once.
        """
        without_layers = sum(prod(rule.shape) for rule in replace(self, num_layers=0).tensors())
        return without_layers + self.sum_over_layers(lambda index: self.layer_parameters(index, active=active))

    def parameters_text(self) -> str:
        """Return the number of parameters for a message, with that of active ones if there are experts."""
        active = f" ({self.num_parameters(active=True):,} active)" if self.num_experts else ""
        return f"{self.num_parameters():,} parameters{active}"

    def sum_over_layers(self, count: Callable[[int], int]) -> int:
        """Return the sum of `count(index)` over the blocks; called once for equal blocks."""
        dense = next((index for index in range(self.num_layers) if not self.has_experts(index)), None)
        sparse = next((index for index in range(self.num_layers) if self.has_experts(index)), None)
        num_dense = self.num_layers - self.num_moe_layers()
        return (0 if dense is None else num_dense * count(dense)) + \
            (0 if sparse is None else self.num_moe_layers() * count(sparse))

    def num_moe_layers(self) -> int:
        """Return the number of blocks with experts."""
        return sum(self.has_experts(index) for index in range(self.num_layers)) if self.num_experts else 0

    def active_elements(self, rule: TensorRule) -> int:
        """Return the elements of a parameter that process a token: those of experts_per_token experts."""
        size = prod(rule.shape)
        return size * self.experts_per_token // self.num_experts if len(rule.shape) == 3 else size


def preset_names() -> list[str]:
    """Return the names of the presets that `--model` accepts."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def find_config(model: str) -> Path:
    """Return the path of the config.json that a preset's name, a file, a folder or a repository selects.

    A repository (org/name) is downloaded if the local cache does not have it. Raises ConfigError.
    """
    preset = PRESETS / f"{model}.json"
    if model in preset_names():
        return preset
    if is_repository(model):
        return find_repository(model, flag="--model", want="config") / "config.json"
    folder = os.path.isdir(model)
    path = snapshot_in(Path(model)) / "config.json" if folder else Path(model)
    if os.path.isfile(path):
        return path
    if os.path.isdir(os.path.join(model, "checkpoints")):
        raise ConfigError(f"--model {shorten(model)}", problem="this is a run folder, and not a config.json",
                          remedy=f"--init_from {shorten(model)} takes the model and the weights of that run")
    if folder or "/" in model or model.endswith(".json"):
        raise ConfigError(f"--model {shorten(model)}", problem=f"there is no file {shorten(str(path))}",
                          remedy="give a preset's name, a transformers config.json, or the folder that holds one")
    names = preset_names()
    problem = f"there is no preset, file or folder {shorten(model)!r}"
    if similar := [name for name in names if _beginning(name) == _beginning(model)]:
        raise ConfigError("--model", problem=problem, word=model, known=names,
                          remedy=f"the presets with a similar name are {', '.join(similar)}")
    raise ConfigError("--model", problem=problem, word=model, known=names,
                      remedy=f"give a config.json, its folder, a repository (org/name) or one of {', '.join(names)}")


def _beginning(name: str) -> str:
    """Return the letters and digits with which a model's name begins: gpt2 of gpt2-xl, llama of llama3-8b."""
    family = re.split(r"[-_ ]", name.lower())[0]
    return family if family.startswith("gpt") else family.rstrip("0123456789.")


def load_model_config(model: str, overrides: str | None = None) -> ModelConfig:
    """Load the model config that `--model` and `--model_overrides` specify.

    Args:
        model: preset name, path of a config.json, or of a folder that holds one.
        overrides: `key=value,key=value` with keys of that config.json.

    Raises:
        ConfigError: the preset or file does not exist, an override is invalid, or an architecture, key or value is not
            implemented.
    """
    if not model:
        raise ConfigError("--model", problem="it is required", remedy="give a config.json, its folder, or one of "
                          f"{', '.join(preset_names())}")
    path = find_config(model)
    where = f"--model {model}" if path.parent == PRESETS else str(path)
    return model_config_from(read_config_json(path), where, overrides)


def model_config_from(values: dict[str, Any], where: str, overrides: str | None = None) -> ModelConfig:
    """Return the model config for a config.json's content. `where` names the file in errors. Raises ConfigError."""
    architecture = values.get("model_type")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        found = "nothing" if architecture is None else json.dumps(architecture)
        raise ConfigError(f"{where}: model_type", found=found, expected=f"one of {listing(FAMILIES)}",
                          word=_architecture_name(str(architecture)), known=FAMILIES)
    check_model_keys(values, architecture, where)
    changed = parse_overrides(overrides, architecture, values) if overrides else {}
    values = {**values, **changed}
    check_model_keys(values, architecture, "--model_overrides" if changed else where)
    check_model_types(values, architecture, where)
    complete = {**FAMILIES[architecture].keys, **values}
    config = ModelConfig(architecture=architecture, hf_config=copy.deepcopy(values),
                         **FAMILIES[architecture].read(complete, where))
    _check_sizes(config, where)
    return config


def _architecture_name(word: str) -> str:
    """Return "gpt_neox" for GPT-NeoX; "" for the name of another architecture, such as gpt_neo."""
    name = word.lower().replace("-", "_")
    return "" if name in _OTHER_ARCHITECTURES else name


def _check_sizes(config: ModelConfig, where: str) -> None:
    """Raise ConfigError for sizes that are out of range or do not divide each other as required."""
    for field, largest in _LARGEST.items():
        value = getattr(config, field)
        if not 0 < value <= largest:
            raise ConfigError(f"{where}: {config.key(field)}", found=value,
                              expected="more than 0" if value <= 0 else f"at most {largest:,}")
    if config.position == "learned" and config.max_positions > _LARGEST_TABLE:
        raise ConfigError(f"{where}: {config.key('max_positions')}", found=config.max_positions,
                          expected=f"at most {_LARGEST_TABLE:,}")
    for field in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        if not 0 <= getattr(config, field) < 1:
            raise ConfigError(f"{where}: {config.key(field)}", found=getattr(config, field),
                              expected="a probability from 0 to below 1")
    if not 0 <= config.initializer_range <= 1e3:
        raise ConfigError(f"{where}: initializer_range", found=config.initializer_range,
                          expected="a standard deviation, such as 0.02")
    if config.num_experts:
        _check_experts(config, where)
    for multiple, divisor in (("hidden_size", "num_heads"), ("num_heads", "num_kv_heads")):
        if getattr(config, multiple) % getattr(config, divisor):
            raise ConfigError(f"{where}: {config.key(multiple)}", found=getattr(config, multiple),
                              expected=f"a multiple of {config.key(divisor)} ({getattr(config, divisor)})")
    if config.position == "rope" and not (0 < config.rotary_size <= config.head_size and config.rotary_size % 2 == 0):
        raise ConfigError(f"{where}: {config.key('rotary_size')}", found=f"{config.rotary_size} rotary elements a head",
                          expected=f"an even number from 2 to the head size ({config.head_size})")


def _check_experts(config: ModelConfig, where: str) -> None:
    """Raise ConfigError for sizes of experts that are out of range."""
    largest = {"num_experts": 2**14, "experts_per_token": config.num_experts,
               "moe_intermediate_size": _LARGEST["intermediate_size"]}
    for field, high in largest.items():
        value = getattr(config, field)
        if not 0 < value <= high:
            raise ConfigError(f"{where}: {config.key(field)}", found=value, expected="more than 0" if value <= 0 else
                              f"at most {high:,}" + (", the number of experts" if field == "experts_per_token" else ""))
    if not 0 <= config.shared_expert_size <= _LARGEST["intermediate_size"]:
        raise ConfigError(f"{where}: {config.key('shared_expert_size')}", found=config.shared_expert_size,
                          expected="the inner size of the shared expert")
    if not 0 <= config.router_aux_loss <= 1e3:
        raise ConfigError(f"{where}: {config.key('router_aux_loss')}", found=config.router_aux_loss,
                          expected="a coefficient, such as 0.01")
    if not config.num_moe_layers():
        raise ConfigError(f"{where}: mlp_only_layers", problem="no layer has experts",
                          remedy="remove layers from mlp_only_layers, or lower decoder_sparse_step")
