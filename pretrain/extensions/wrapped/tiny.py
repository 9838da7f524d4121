"""A tiny copy of a transformers config: the same choices and kinds of layers, with small sizes.

The proof (prove.py) trains such a copy in seconds. Each number of the config gets its tiny value from the first row of
`_RULES` that its key matches. A number whose key matches no row keeps its value. The copy has the first layers of the
model, so many that each kind of layer occurs, and occurs twice where that needs at most `_LARGEST_DEPTH` layers.

Sizes of a model divide each other in ways that only its code knows: 6 heads of a state-space layer divide no 128
elements. Further copies therefore keep all numbers of heads and groups, and divide all widths by one number; the last
ones keep the widths, too. Whatever divides in the model divides in such a copy.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from pretrain.errors import ConfigError, shorten
from pretrain.model.skeleton import create_skeleton

BATCH, TOKENS = 2, 22  # shape of the samples of the proof; longer than the windows, and no multiple of the chunks
_VOCABULARY, _HIDDEN, _HEADS, _HEAD, _WINDOW, _POSITIONS, _LARGEST_DEPTH = 100, 64, 4, 16, 8, 64, 16

_NARROWEST = 4  # elements of the narrowest part of a copy whose widths are divided
_MOST_PARAMETERS = 10**8  # most parameters of a copy: its proof takes a minute
# keys of the number of layers
_LAYERS = re.compile("num_hidden_layers|n_layers?|num_layers|num_blocks|(decoder|encoder)_layers|"
                     "num_(decoder|encoder)_layers|num_layers_per_stack")
# keys of lists of layer indices
_INDICES = re.compile("mlp_only_layers|moe_layers|full_attn_idxs|.*layer_ids|attn_layer_indices")
_TOKEN_IDS = re.compile(".*_token_ids?|.*_(token_)?index|.*_tokens")
_DROPOUTS = re.compile(".*dropout.*|.*_pdrop|.*jitter.*")


class _Sizes:
    """Sizes of the original config, to which others are relative; 0 for a size that it does not have."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._values, self._names = config.to_dict(), config.attribute_map
        self.hidden = self.read("hidden_size")
        self.heads = self.read("num_attention_heads", "num_heads")
        self.head = self.read("head_dim", "d_head", "kv_channels", "attention_head_dim")
        if not self.head and self.heads:
            self.head = self.hidden // self.heads
        self.positions = self.read("max_position_embeddings")

    def read(self, *names: str) -> int:
        """Return the number of the first key that has one."""
        values = (self._values.get(self._names.get(name, name)) for name in names)
        return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)


_Rule = Callable[[int, _Sizes], int]


def _at_most(size: int) -> _Rule:
    return lambda value, _: min(value, size)


def _width(value: int, sizes: _Sizes) -> int:
    """Return a size of hidden states: a simple multiple of hidden_size remains that multiple."""
    for times, parts in ((1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (1, 2), (1, 4)):
        if value * parts == sizes.hidden * times:
            return _HIDDEN * times // parts
    return min(value, _HIDDEN + _HIDDEN // 2)


def _heads(value: int, sizes: _Sizes) -> int:
    """Return a number of query heads: a layer with more heads than others keeps more, in an even number."""
    if not sizes.heads or value == sizes.heads:
        return min(value, _HEADS)
    return min(value, max(1, _HEADS * value // sizes.heads + 1) // 2 * 2 or 1)


def _kv_heads(value: int, sizes: _Sizes) -> int:
    return min(value, _HEADS) if value in (1, sizes.heads) else min(value, _HEADS // 2)


def _head(value: int, sizes: _Sizes) -> int:
    """Return the size of a head. All heads together remain as wide as the hidden states, or twice as wide."""
    if sizes.read("qk_nope_head_dim"):  # latent attention: heads have parts with and without rotation
        return _HEAD // 2 if value == sizes.read("qk_rope_head_dim") else _HEAD + _HEAD // 2
    for times in (1, 2):
        if value * sizes.heads == sizes.hidden * times:
            return _HIDDEN * times // min(sizes.heads, _HEADS)
    return max(1, min(value, 2 * _HEAD * value // sizes.head))


def _rope_part(value: int, sizes: _Sizes) -> int:
    """Return the number of elements of a head that rotate; it is even."""
    if sizes.read("qk_nope_head_dim"):
        return _HEAD // 2
    return max(2, value * _head(sizes.head, sizes) // sizes.head // 2 * 2)


def _nope_and_rope(value: int, sizes: _Sizes) -> int:
    return _HEAD + _HEAD // 2


def _mamba_head(value: int, sizes: _Sizes) -> int:
    """Return the size of a head of a state-space layer: all heads are `expand` times as wide as the hidden states."""
    return 2 * _HIDDEN // min(8, sizes.read("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"))


def _linear_value_heads(value: int, sizes: _Sizes) -> int:
    return 2 * max(1, value // sizes.read("linear_num_key_heads"))


def _linear_value_head(value: int, sizes: _Sizes) -> int:
    return _HEAD * max(1, value // sizes.read("linear_key_head_dim"))


def _positions(value: int, sizes: _Sizes) -> int:
    """Return a number of positions: its ratio to the longest sequence remains."""
    if sizes.positions <= _POSITIONS:
        return value
    return max(1, min(value, sizes.positions) * _POSITIONS // sizes.positions)


# key of a number (regular expression, all of the key) -> its tiny value
_RULES: tuple[tuple[str, _Rule], ...] = (
    (".*vocab_size.*|.*_vocab|n_words|n_token", _at_most(_VOCABULARY)),
    ("max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length|max_target_positions|"
     "original_max_position_embeddings|log_scaling_n_floor|floor_scale", _positions),
    (".*sliding_window|.*window_size|.*window_len|local_attention|.*chunk_size|.*chunk_length|block_size",
     _at_most(_WINDOW)),
    # state-space and linear attention
    ("mamba_n_heads|mamba_num_heads|n_mamba_heads", _at_most(8)),
    ("mamba_d_head|mamba_head_dim|mamba_headdim", _mamba_head),
    ("mamba_d_ssm", lambda value, sizes: 2 * _HIDDEN),
    ("mamba_d_state|ssm_state_size|state_size", _at_most(8)),
    ("mamba_n_groups|mamba_ngroups|n_groups|o_groups", _at_most(2)),
    ("time_step_rank|mamba_dt_rank", _at_most(4)),
    ("linear_num_key_heads", _at_most(2)),
    ("linear_num_value_heads", _linear_value_heads),
    ("linear_value_head_dim", _linear_value_head),
    ("linear_key_head_dim|linear_head_dim", _at_most(_HEAD)),
    ("linear_num_heads", _at_most(_HEADS)),
    # latent attention and indexers
    ("qk_nope_head_dim|v_head_dim", _at_most(_HEAD)),
    ("index_head_dim|indexer_head_dim", _at_most(2 * _HEAD)),
    ("qk_rope_head_dim|rotary_dim", _rope_part),
    ("qk_head_dim", _nope_and_rope),
    (".*lora_rank|.*lowrank|moe_latent_size", _at_most(20)),
    ("adapter_rank|laurel_rank|gated_norm_rank|d_rel", _at_most(4)),
    ("index_n_heads|indexer_n_heads", _at_most(_HEADS)),
    ("index_topk|indexer_budget", _at_most(8)),
    ("index_topk_blocks", _at_most(2)),
    ("index_block_size|indexer_compress_ratio|compress_rates", _at_most(4)),
    # attention
    (".*num_attention_heads.*|n_heads?|num_heads|.*attention_heads|num_query_groups", _heads),
    (".*num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|indexer_kv_heads", _kv_heads),
    (".*head_dim|d_head|dim_head|kv_channels|attention_head_size", _head),
    # experts
    ("num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num", _at_most(16)),
    ("num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|moe_top_k|top_k_experts", _at_most(3)),
    ("n_group|num_expert_group", _at_most(4)),
    ("topk_group", _at_most(2)),
    (".*moe_.*intermediate_size|expert_ffn_hidden_size|router_hidden_size", _at_most(_HIDDEN // 2)),
    # widths
    ("hidden_size_per_layer_input|ple_embed_dim", _at_most(8)),
    ("hidden_size|n_embd|d_model|emb_dim|dim_model|embedding_dim|lru_width|attention_hidden_size|dim_model_base|"
     ".*embedding_size|word_embed_proj_dim|backbone_hidden_size|.*embed_dim", _width),
    (".*intermediate_.*size.*|.*ffn_dim|ffn_hidden_size|n_inner|dff|d_inner|dim_ff|feed_forward_size", _width),
    ("block_multiple_of|rel_extent", _at_most(_HEAD)),
    ("ngram_vocab_size_base|split_ngram_parts|make_ngram_vocab_size_divisible_by", _at_most(4)),
)
# Keys of the numbers that a copy with the model's own divisibility divides (`_WIDTHS`), keeps (`_COUNTS`), or gets from
# the rules although it keeps all others (`_LENGTHS`).
_WIDTHS = re.compile("mamba_d_head|mamba_headdim|mamba_d_ssm|.*head_dim|rotary_dim|d_head|dim_head|kv_channels|"
                     "attention_head_size|.*intermediate_.*size.*|.*hidden_size|n_embd|d_model|emb_dim|dim_model|"
                     "embedding_dim|lru_width|dim_model_base|.*embedding_size|word_embed_proj_dim|.*embed_dim|.*ffn_dim|"
                     "ffn_hidden_size|n_inner|dff|d_inner|dim_ff|feed_forward_size|block_multiple_of")
_COUNTS = re.compile(".*heads?|.*groups?|n_head_kv|linear_num_.*|.*experts?|.*topk.*|.*top_k.*|.*_per_tok(en)?|moe_k")
_LENGTHS = re.compile(f"{_RULES[0][0]}|{_RULES[1][0]}|{_RULES[2][0]}")
_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)


def tiny_copy(config: PretrainedConfig, model_class: Any = None) -> PretrainedConfig:
    """Return the first tiny copy of the config. Raises ConfigError if there is none: see `tiny_copies`."""
    return next(tiny_copies(config, model_class))


def tiny_copies(config: PretrainedConfig, model_class: Any = None) -> Iterator[PretrainedConfig]:
    """Yield the tiny copies of a config that can be built, those with the smallest sizes first.

    Raises ConfigError if there is none. `model_class`: of the user's code; None: transformers' class of the model_type.
    """
    first_error: Exception | None = None
    found: list[dict[str, Any]] = []
    for rules in _rule_sets(config):
        try:
            narrow = _narrow(config, rules)
            model = create_skeleton(narrow, model_class)
            copied = type(config).from_dict(_cut(narrow.to_dict(), config.sub_configs, model))
            is_small = rules is _rule or _num_parameters(create_skeleton(copied, model_class)) <= _MOST_PARAMETERS
        except Exception as error:  # raised by transformers, or by the user's code
            first_error = first_error or error
            continue
        if is_small and (values := copied.to_dict()) not in found:
            found.append(values)
            yield copied
    if not found and first_error is not None:
        reason = " ".join(str(first_error).split())
        raise ConfigError(f"the model_type {config.model_type}", problem="no tiny copy of its config can be built, on "
                          f"which gradients are compared: {type(first_error).__name__}: {shorten(reason)}",
                          remedy="such a model cannot be trained here") from first_error


_Rules = Callable[[str], _Rule | None]  # key -> its rule


def _rule_sets(config: PretrainedConfig) -> Iterator[_Rules]:
    """Yield the rules of each copy: all sizes small; the model's numbers of heads; all sizes of the model."""
    yield _rule
    widths = [value for key, value in _numbers(config.to_dict()) if _WIDTHS.fullmatch(key) and value > 0]
    # heads of an odd size have no rotary positions
    for divisor in dict.fromkeys((_largest_divisor(widths, even=True), _largest_divisor(widths, even=False))):
        def rules(key: str, divisor: int = divisor) -> _Rule | None:
            if _WIDTHS.fullmatch(key):
                return lambda value, _: value // divisor
            return None if _COUNTS.fullmatch(key) else _rule(key)
        yield rules
    yield lambda key: _rule(key) if _LENGTHS.fullmatch(key) else None


def _largest_divisor(widths: Sequence[int], *, even: bool) -> int:
    """Return the largest common divisor of widths after which all are at least 4, and even if all were."""
    common = math.gcd(*widths)
    for divisor in range(min([common, *(width // _NARROWEST for width in widths)], default=1), 1, -1):
        if common % divisor == 0 and not (even and any(width // divisor % 2 for width in widths)):
            return divisor
    return 1


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield the key and the value of all whole numbers in a config."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _numbers(value, name if isinstance(name, str) and _rule(name) else key or str(name))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _narrow(config: PretrainedConfig, rules: _Rules) -> PretrainedConfig:
    """Return the config with tiny widths, and all of its layers."""
    sizes = _Sizes(config)
    values = copy.deepcopy(config.to_dict())
    special = iter(range(_VOCABULARY - 1, 0, -1))
    for key, value in values.items():
        if key in config.sub_configs and isinstance(value, dict):
            values[key] = _narrow(getattr(config, key), rules).to_dict()
        elif not _LAYERS.fullmatch(key) and not _INDICES.fullmatch(key):
            values[key] = _tiny_value(key, value, sizes, special, rules)
    return type(config).from_dict(values)


def _tiny_value(key: str, value: Any, sizes: _Sizes, special: Iterator[int], rules: _Rules) -> Any:
    """Return the tiny value of a key: of a number by the rules, of lists and dicts for each element."""
    if isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return {name: _tiny_value(name if isinstance(name, str) and _rule(name) else key, each, sizes, special, rules)
                for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if key in ("long_factor", "short_factor", "mrope_section"):
            head = rules("head_dim")
            return _rope_list(key, value, sizes.head, head(sizes.head, sizes) if head else sizes.head)
        return [_tiny_value(key, each, sizes, special, rules) for each in value]
    if isinstance(value, float) and _DROPOUTS.fullmatch(key):
        return 0.0
    if not isinstance(value, int):
        return value
    if _TOKEN_IDS.fullmatch(key):
        return next(special) if value >= _VOCABULARY else value
    rule = rules(key)
    return value if rule is None or value <= 0 else rule(value, sizes)


def _rule(key: str) -> _Rule | None:
    return next((rule for pattern, rule in _COMPILED if pattern.fullmatch(key)), None)


def _rope_list(key: str, value: Any, head: int, tiny_head: int) -> list[Any]:
    """Return a list with an element for each pair of rotary elements, or with counts of such pairs."""
    if key != "mrope_section":
        return list(value)[: max(1, len(value) * tiny_head // head)]
    return [max(1, each * tiny_head // head) for each in value]


def _depth(model: nn.Module, depths: set[int]) -> tuple[int, int]:
    """Return the number of decoder layers, and of how many first ones the tiny copy consists.

    They have each kind of layer, twice if that needs at most `_LARGEST_DEPTH` layers.
    """
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) in depths]
    depth, needed = max((len(stack) for stack in stacks), default=0), 0
    for kinds in ([_kind(layer) for layer in stack] for stack in stacks if len(stack) == depth):
        needed = max(needed, min(2, depth))
        for kind in set(kinds):
            first, *later = [index for index, each in enumerate(kinds) if each == kind]
            needed = max(needed, first + 1, *(index + 1 for index in later[:1] if index < _LARGEST_DEPTH))
    return depth, needed


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes a layer from others: its modules, their settings and the shapes of parameters."""
    modules = tuple((name, type(module).__name__, *_settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a module, without its position among the layers."""
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and name != "training" and isinstance(value, (bool, int, str, type(None))) and not (
                re.search("idx|index|_id$|number|depth", name)):
            yield name, value


def _cut(values: dict[str, Any], sub_configs: Iterable[str], model: nn.Module) -> dict[str, Any]:
    """Return the values of a config with the first layers that `_depth` needs."""
    depth, layers = _depth(model, {value for key, value in values.items() if _LAYERS.fullmatch(key) and value})
    cut = dict(values)
    for key, value in values.items():
        if key in sub_configs:
            cut[key] = _cut(value, (), model) if isinstance(value, dict) else value
        elif layers < depth:
            cut[key] = _cut_value(key, value, depth, layers)
    return cut


def _cut_value(key: str, value: Any, depth: int, layers: int) -> Any:
    """Return the value of a key in a config with `layers` instead of `depth` layers."""
    if _LAYERS.fullmatch(key) and isinstance(value, int):
        return max(1, value * layers // depth)
    if key == "per_layer_config" and isinstance(value, dict):
        return {name: each for name, each in value.items() if int(name) < layers}
    if not isinstance(value, list):
        return value
    if _INDICES.fullmatch(key):
        return [each for each in value if each < layers]
    return value[:layers] if len(value) == depth else value
