"""Convert weights exactly to and from transformers' GPT2LMHeadModel, GPTNeoXForCausalLM and LlamaForCausalLM."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from pretrain.errors import ConfigError
from pretrain.model.architectures import ModelConfig

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Rule:
    """One tensor of this model, the transformers tensors with the same numbers, and the conversion functions."""

    ours: str
    theirs: tuple[str, ...]
    to_theirs: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    to_ours: Callable[..., torch.Tensor]


def _same(ours: str, theirs: str) -> _Rule:
    return _Rule(ours, (theirs,), lambda tensor: (tensor,), lambda tensor: tensor)


def _transposed(ours: str, theirs: str) -> _Rule:
    """Return the rule for a transposed matrix: GPT-2's Conv1D stores [in, out]."""
    return _Rule(ours, (theirs,), lambda tensor: (tensor.t().contiguous(),), lambda tensor: tensor.t().contiguous())


def _split(ours: str, theirs: tuple[str, ...], rows: tuple[int, ...]) -> _Rule:
    """Return the rule for q, k and v: three matrices in Llama, one matrix here, with `rows` rows for each of them."""
    return _Rule(ours, theirs, lambda tensor: tuple(part.clone() for part in tensor.split(rows)),
                 lambda *parts: torch.cat(parts))


def _interleaved(ours: str, theirs: str, num_heads: int) -> _Rule:
    """Return the rule for another order of rows: GPT-NeoX has head, then q, k, v; here it is q, k, v, then head."""

    def swap(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        rest = tensor.shape[1:]
        return tensor.reshape(outer, inner, -1, *rest).transpose(0, 1).reshape(-1, *rest).contiguous()

    return _Rule(ours, (theirs,), lambda tensor: (swap(tensor, 3, num_heads),), partial(swap, outer=num_heads, inner=3))


def _affine(ours: str, theirs: str, rule: Callable[[str, str], _Rule] = _same, *, bias: bool = True) -> Iterator[_Rule]:
    """Yield the rules of a weight and of its bias; `rule` applies to the weight only."""
    yield rule(f"{ours}.weight", f"{theirs}.weight")
    if bias:
        yield _same(f"{ours}.bias", f"{theirs}.bias")


def _gpt2_block(ours: str, index: int, config: ModelConfig) -> Iterator[_Rule]:
    theirs = f"transformer.h.{index}"
    yield from _affine(f"{ours}.norm1", f"{theirs}.ln_1")
    yield from _affine(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", _transposed)
    yield from _affine(f"{ours}.attention.out", f"{theirs}.attn.c_proj", _transposed)
    yield from _affine(f"{ours}.norm2", f"{theirs}.ln_2")
    yield from _affine(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", _transposed)
    yield from _affine(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", _transposed)


def _gpt_neox_block(ours: str, index: int, config: ModelConfig) -> Iterator[_Rule]:
    theirs = f"gpt_neox.layers.{index}"
    yield from _affine(f"{ours}.norm1", f"{theirs}.input_layernorm")
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        yield _interleaved(f"{ours}.attention.qkv.{kind}", f"{theirs}.attention.query_key_value.{kind}",
                           config.num_heads)
    yield from _affine(f"{ours}.attention.out", f"{theirs}.attention.dense", bias=config.attention_out_bias)
    yield from _affine(f"{ours}.norm2", f"{theirs}.post_attention_layernorm")
    yield from _affine(f"{ours}.mlp.up", f"{theirs}.mlp.dense_h_to_4h")
    yield from _affine(f"{ours}.mlp.down", f"{theirs}.mlp.dense_4h_to_h")


def _llama_block(ours: str, index: int, config: ModelConfig) -> Iterator[_Rule]:
    theirs = f"model.layers.{index}"
    rows = tuple(heads * config.head_size for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads))
    yield _same(f"{ours}.norm1.weight", f"{theirs}.input_layernorm.weight")
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
        yield _split(f"{ours}.attention.qkv.{kind}", names, rows)
    yield from _affine(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", bias=config.attention_out_bias)
    yield _same(f"{ours}.norm2.weight", f"{theirs}.post_attention_layernorm.weight")
    for part in ("gate", "up", "down"):
        yield from _affine(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj", bias=config.mlp_bias)


_BLOCKS = {"gpt2": _gpt2_block, "gpt_neox": _gpt_neox_block, "llama": _llama_block}
_PREFIX = {"gpt2": "transformer.", "gpt_neox": "gpt_neox.", "llama": "model."}
_EMBEDDING = {"gpt2": "transformer.wte.weight", "gpt_neox": "gpt_neox.embed_in.weight",
              "llama": "model.embed_tokens.weight"}
_FINAL_NORM = {"gpt2": "transformer.ln_f", "gpt_neox": "gpt_neox.final_layer_norm", "llama": "model.norm"}
_HEAD = "lm_head.weight"
# buffers that older versions of transformers saved with the weights
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def _rules(config: ModelConfig) -> list[_Rule]:
    """Return one rule for each tensor of this model, in the order of build_specs."""
    kind = config.architecture
    first = "tied_modules.embed.embedding" if config.tie_word_embeddings else "0.embedding"
    rules = [_same(first, _EMBEDDING[kind])]
    if config.position == "learned":
        rules.append(_same("1.embedding", "transformer.wpe.weight"))
    start = len(rules)
    for index in range(config.num_layers):
        rules.extend(_BLOCKS[kind](str(start + index), index, config))
    end = start + config.num_layers
    rules.extend(_affine(f"{end}.norm", _FINAL_NORM[kind], bias=config.norm == "layernorm"))
    if not config.tie_word_embeddings:
        rules.append(_same(f"{end + 1}.lm_head.weight", _HEAD))
    return rules


def _require_names(found: set[str], expected: set[str], what: str) -> None:
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        parts = [f"{len(names)} {word} ({names[0]} ...)" for word, names in (("missing", missing), ("unknown", extra))
                 if names]
        raise ConfigError(what, found=" and ".join(parts), expected="exactly the tensors of this model config")


def to_transformers(state: Mapping[str, torch.Tensor], config: ModelConfig) -> State:
    """Return the state_dict of the transformers model of `config.hf_config`, including a tied `lm_head.weight`.

    Args:
        state: tensors under the names of `as_module`. Dtypes are kept. The result may share these tensors.

    Raises:
        ConfigError: a tensor is missing or unknown.
    """
    rules = _rules(config)
    _require_names(set(state), {rule.ours for rule in rules}, "weights")
    result: State = {}
    for rule in rules:
        result.update(zip(rule.theirs, rule.to_theirs(state[rule.ours]), strict=True))
    if config.tie_word_embeddings:
        result[_HEAD] = result[_EMBEDDING[config.architecture]]
    return result


def from_transformers(state: Mapping[str, torch.Tensor], config: ModelConfig) -> State:
    """Return a state_dict for `as_module(config)`: the inverse of `to_transformers`.

    Also accepts variants found on the Hub: without `transformer.` prefix, without tied head, with old buffers.

    Raises:
        ConfigError: a tensor is missing or unknown, or the head differs from the embedding although it is tied.
    """
    kind, what = config.architecture, "transformers weights"
    theirs = {name: tensor for name, tensor in state.items() if not name.endswith(_BUFFERS)}
    if not any(name.startswith(_PREFIX[kind]) for name in theirs):
        theirs = {name if name == _HEAD else _PREFIX[kind] + name: tensor for name, tensor in theirs.items()}
    head = theirs.pop(_HEAD, None) if config.tie_word_embeddings else None
    rules = _rules(config)
    _require_names(set(theirs), {name for rule in rules for name in rule.theirs}, what)
    if head is not None and not torch.equal(head, theirs[_EMBEDDING[kind]]):
        raise ConfigError(f"{what}: {_HEAD}", found="a matrix other than the embedding's",
                          expected="the same, as tie_word_embeddings is true")
    return {rule.ours: rule.to_ours(*(theirs[name] for name in rule.theirs)) for rule in rules}
