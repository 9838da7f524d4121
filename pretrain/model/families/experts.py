"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Attention and norms are from llama_like.py. In the weights files of transformers each expert has matrices of its
own; here, one tensor has the matrices of all experts.
"""

from dataclasses import replace
from typing import Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, Fields, Values
from pretrain.model.families.llama_like import (
    BLOCK,
    FIELDS,
    KEY_NAMES,
    KEYS,
    NAMES,
    read_rotary,
    read_with_windows,
)
from pretrain.model.families.position_keys import LARGEST_LAYERS, read_windows

_KEYS: dict[str, Any] = {**KEYS, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_KEY_NAMES = {**KEY_NAMES, "experts_per_token": "num_experts_per_tok", "router_aux_loss": "router_aux_loss_coef"}
_QWEN_KEYS: dict[str, Any] = {
    **_KEYS, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_IGNORED = frozenset({"output_router_logits"})  # the coefficient alone selects the loss
_QWEN_NAMES = replace(NAMES, block={
    **BLOCK, "mlp.router": "mlp.gate", "mlp.experts.gate": "mlp.experts.*.gate_proj",
    "mlp.experts.up": "mlp.experts.*.up_proj", "mlp.experts.down": "mlp.experts.*.down_proj",
    "mlp.shared_expert.gate": "mlp.shared_expert.gate_proj", "mlp.shared_expert.up": "mlp.shared_expert.up_proj",
    "mlp.shared_expert.down": "mlp.shared_expert.down_proj", "mlp.shared_expert_gate": "mlp.shared_expert_gate"})
_MIXTRAL_NAMES = replace(NAMES, block={
    **BLOCK, "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.*.w1",
    "mlp.experts.up": "block_sparse_moe.experts.*.w3", "mlp.experts.down": "block_sparse_moe.experts.*.w2"})


def _read_mixtral(values: Values, fields: Fields, where: str) -> Fields:
    _check_experts(fields["num_experts"], f"{where}: num_local_experts")
    return read_with_windows(values, fields, where)


def _read_olmoe(values: Values, fields: Fields, where: str) -> Fields:
    _check_experts(fields["num_experts"], f"{where}: num_experts")
    return read_rotary(values, fields, where)


def _read_qwen2(values: Values, fields: Fields, where: str) -> Fields:
    first, shared = values["max_window_layers"], values["shared_expert_intermediate_size"]
    if shared < 1:
        raise ConfigError(f"{where}: shared_expert_intermediate_size", found=shared, expected="at least 1")
    values = {**values, "sliding_window": values["sliding_window"] or None}  # transformers 5 saves 0 for none
    # transformers 5 (configuration_qwen2_moe.py): only even layers below max_window_layers have a window
    windows = read_windows(values, where, enabled=values["use_sliding_window"],
                           slides=lambda index: index % 2 == 0 and index < first)
    return {**read_rotary(values, fields, where), "windows": windows, **_qwen_experts(values, where)}


def _read_qwen3(values: Values, fields: Fields, where: str) -> Fields:
    windows = read_windows(values, where, enabled=values["use_sliding_window"])
    return {**read_rotary(values, fields, where), "windows": windows, **_qwen_experts(values, where)}


def _qwen_experts(values: Values, where: str) -> Fields:
    """Read the experts. Every decoder_sparse_step-th layer has them, except those in mlp_only_layers."""
    step, mlp_only, layers = values["decoder_sparse_step"], values["mlp_only_layers"] or [], values["num_hidden_layers"]
    if step < 1:
        raise ConfigError(f"{where}: decoder_sparse_step", found=step, expected="at least 1")
    if any(isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers for index in mlp_only):
        raise ConfigError(f"{where}: mlp_only_layers", found=str(mlp_only),
                          expected=f"a list of layers, from 0 to {layers - 1}")
    dense = {index for index in range(min(layers, LARGEST_LAYERS)) if index in mlp_only or (index + 1) % step}
    key = "num_experts" if values["num_local_experts"] is None else "num_local_experts"  # transformers 5 reads both
    _check_experts(values[key], f"{where}: {key}")
    return {"num_experts": values[key], "dense_layers": frozenset(dense)}


def _check_experts(count: int, where: str) -> None:
    if count < 1:
        raise ConfigError(where, found=count, expected="at least 1", remedy="use the family without experts")


MIXTRAL = Family(
    keys={**_KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8},
    fixed={"router_jitter_noise": 0.0}, ignored=_IGNORED, fields={**FIELDS, "norm_topk_prob": True},
    key_names={**_KEY_NAMES, "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    read=_read_mixtral, names=_MIXTRAL_NAMES)
OLMOE = Family(
    keys={**_KEYS, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
          "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
          "num_experts_per_tok": 8, "num_experts": 64, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
    fixed={"clip_qkv": None}, ignored=_IGNORED, fields={**FIELDS, "qk_norm": "all"},
    key_names={**_KEY_NAMES, "moe_intermediate_size": "intermediate_size"},
    read=_read_olmoe, names=_QWEN_NAMES)
QWEN2_MOE = Family(
    keys={**_QWEN_KEYS, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
          "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
          "num_experts": 60, "num_local_experts": None, "qkv_bias": True, "max_window_layers": 28,
          "layer_types": None},
    nullable=frozenset({"num_key_value_heads", "sliding_window"}), ignored=_IGNORED,
    fields={**FIELDS, "shared_expert_gate": True},
    key_names={**_KEY_NAMES, "shared_expert_size": "shared_expert_intermediate_size", "qkv_bias": "qkv_bias"},
    read=_read_qwen2, names=_QWEN_NAMES)
QWEN3_MOE = Family(
    keys={**_QWEN_KEYS, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
          "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "num_local_experts": None,
          "attention_bias": False},
    nullable=frozenset({"sliding_window"}), ignored=_IGNORED | {"max_window_layers"}, key_names=_KEY_NAMES,
    fields={**FIELDS, "qk_norm": "head"}, read=_read_qwen3, names=_QWEN_NAMES)
