"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE.

Attention and norms are those of llama_like.py. In the weights files of transformers each expert has matrices of its
own; here, one tensor has the matrices of all experts.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError
from pretrain.model.families.family import Family, TensorRule, Values, linear
from pretrain.model.families.llama_like import KEY_NAMES, KEYS, llama_like_tensors, mlp_tensors, read_llama_like
from pretrain.model.families.windows import LARGEST_LAYERS, read_windows

if TYPE_CHECKING:
    from pretrain.model.config import ModelConfig

_KEYS: dict[str, Any] = {**KEYS, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}
_KEY_NAMES = {**KEY_NAMES, "experts_per_token": "num_experts_per_tok", "router_aux_loss": "router_aux_loss_coef"}
_QWEN_KEYS: dict[str, Any] = {
    **_KEYS, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_IGNORED = frozenset({"output_router_logits"})  # the coefficient alone selects the loss
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_QWEN_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def _routing(values: Values, *, num_experts: str, expert_size: str) -> dict[str, Any]:
    """Return the fields of ModelConfig that all families with experts read. The arguments are keys."""
    return {"num_experts": values[num_experts], "experts_per_token": values["num_experts_per_tok"],
            "moe_intermediate_size": values[expert_size], "router_aux_loss": values["router_aux_loss_coef"]}


def _read_mixtral(values: Values, where: str) -> dict[str, Any]:
    return {**read_llama_like(values, where, windows=read_windows(values, where)), "norm_topk_prob": True,
            **_at_least_one_expert(_routing(values, num_experts="num_local_experts", expert_size="intermediate_size"),
                                   f"{where}: num_local_experts")}


def _read_olmoe(values: Values, where: str) -> dict[str, Any]:
    bias = values["attention_bias"]
    return {**read_llama_like(values, where, qkv_bias=bias, attention_out_bias=bias, qk_norm="all"),
            "norm_topk_prob": values["norm_topk_prob"],
            **_at_least_one_expert(_routing(values, num_experts="num_experts", expert_size="intermediate_size"),
                                   f"{where}: num_experts")}


def _read_qwen2(values: Values, where: str) -> dict[str, Any]:
    first, shared = values["max_window_layers"], values["shared_expert_intermediate_size"]
    if shared < 1:
        raise ConfigError(f"{where}: shared_expert_intermediate_size", found=shared, expected="at least 1")
    values = {**values, "sliding_window": values["sliding_window"] or None}  # transformers 5 saves 0 for none
    # transformers 5 (configuration_qwen2_moe.py): only even layers below max_window_layers have a window
    windows = read_windows(values, where, enabled=values["use_sliding_window"],
                           slides=lambda index: index % 2 == 0 and index < first)
    return {**read_llama_like(values, where, qkv_bias=values["qkv_bias"], windows=windows),
            **_qwen_experts(values, where), "shared_expert_size": shared,
            "shared_expert_gate": True}


def _read_qwen3(values: Values, where: str) -> dict[str, Any]:
    bias = values["attention_bias"]
    windows = read_windows(values, where, enabled=values["use_sliding_window"])
    return {**read_llama_like(values, where, qkv_bias=bias, attention_out_bias=bias, qk_norm="head", windows=windows),
            **_qwen_experts(values, where)}


def _qwen_experts(values: Values, where: str) -> dict[str, Any]:
    """Read the experts. Every decoder_sparse_step-th layer has them, except those in mlp_only_layers."""
    step, mlp_only, layers = values["decoder_sparse_step"], values["mlp_only_layers"] or [], values["num_hidden_layers"]
    if step < 1:
        raise ConfigError(f"{where}: decoder_sparse_step", found=step, expected="at least 1")
    if any(isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers for index in mlp_only):
        raise ConfigError(f"{where}: mlp_only_layers", found=str(mlp_only),
                          expected=f"a list of layers, from 0 to {layers - 1}")
    dense = {index for index in range(min(layers, LARGEST_LAYERS)) if index in mlp_only or (index + 1) % step}
    key = "num_experts"
    if values["num_local_experts"] is not None:  # transformers 5 reads both names
        values, key = {**values, "num_experts": values["num_local_experts"]}, "num_local_experts"
    return {**_at_least_one_expert(_routing(values, num_experts="num_experts", expert_size="moe_intermediate_size"),
                                   f"{where}: {key}"),
            "norm_topk_prob": values["norm_topk_prob"], "dense_layers": frozenset(dense)}


def _at_least_one_expert(fields: dict[str, Any], where: str) -> dict[str, Any]:
    if fields["num_experts"] < 1:
        raise ConfigError(where, found=fields["num_experts"], expected="at least 1",
                          remedy="use the family without experts")
    return fields


def _experts(parts: dict[str, str], router: str) -> Callable[[str, str, "ModelConfig"], Iterator[TensorRule]]:
    """Return the function that yields the rules of the MLP of a block.

    Args:
        parts: our name of a matrix -> theirs.
        router: their name of the layer with the experts.
    """
    def tensors(ours: str, theirs: str, config: "ModelConfig") -> Iterator[TensorRule]:
        index = int(theirs.rpartition(".")[2])
        if not config.has_experts(index):
            yield from mlp_tensors(f"{ours}.mlp", f"{theirs}.mlp", config, config.intermediate_size)
            return
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        layer = f"{theirs}.{router}"
        yield from linear(f"{ours}.mlp.router", f"{layer}.gate", experts, hidden, bias=False)
        for part, name in parts.items():
            rows, columns = (hidden, inner) if part == "down" else (inner, hidden)
            yield TensorRule(f"{ours}.mlp.experts.{part}", (experts, rows, columns),
                             tuple(f"{layer}.experts.{expert}.{name}.weight" for expert in range(experts)),
                             their_rows=(rows,) * experts)
        if config.shared_expert_size:
            yield from mlp_tensors(f"{ours}.mlp.shared_expert", f"{layer}.shared_expert", config,
                                   config.shared_expert_size)
            if config.shared_expert_gate:
                yield from linear(f"{ours}.mlp.shared_expert_gate", f"{layer}.shared_expert_gate", 1, hidden,
                                  bias=False)

    return tensors


_mixtral_mlp, _qwen_mlp = _experts(_MIXTRAL_PARTS, "block_sparse_moe"), _experts(_QWEN_PARTS, "mlp")


def _mixtral_tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return llama_like_tensors(config, _mixtral_mlp)


def _qwen_tensors(config: "ModelConfig") -> Iterator[TensorRule]:
    return llama_like_tensors(config, _qwen_mlp)


MIXTRAL = Family(
    keys={**_KEYS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8},
    fixed={"router_jitter_noise": 0.0}, ignored=_IGNORED,
    key_names={**_KEY_NAMES, "num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    read=_read_mixtral, tensors=_mixtral_tensors, embedding="model.embed_tokens.weight", prefix="model.")
OLMOE = Family(
    keys={**_KEYS, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
          "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
          "num_experts_per_tok": 8, "num_experts": 64, "router_aux_loss_coef": 0.01, "norm_topk_prob": False},
    fixed={"clip_qkv": None}, ignored=_IGNORED,
    key_names={**_KEY_NAMES, "moe_intermediate_size": "intermediate_size"},
    read=_read_olmoe, tensors=_qwen_tensors, embedding="model.embed_tokens.weight", prefix="model.")
QWEN2_MOE = Family(
    keys={**_QWEN_KEYS, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16,
          "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
          "num_experts": 60, "num_local_experts": None, "qkv_bias": True, "max_window_layers": 28,
          "layer_types": None},
    nullable=frozenset({"num_key_value_heads", "sliding_window"}), ignored=_IGNORED,
    key_names={**_KEY_NAMES, "shared_expert_size": "shared_expert_intermediate_size"},
    read=_read_qwen2, tensors=_qwen_tensors, embedding="model.embed_tokens.weight", prefix="model.")
QWEN3_MOE = Family(
    keys={**_QWEN_KEYS, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
          "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "num_local_experts": None,
          "attention_bias": False},
    nullable=frozenset({"sliding_window"}), ignored=_IGNORED | {"max_window_layers"}, key_names=_KEY_NAMES,
    read=_read_qwen3, tensors=_qwen_tensors, embedding="model.embed_tokens.weight", prefix="model.")
