"""Read a checkpoint of torchtitan: names, order of rotary pairs, optimizer states, position in the data.

| what | torchtitan 0.1 | 0.2 | 0.3 |
| --- | --- | --- | --- |
| weights | `model.` before the names | no prefix | no prefix |
| queries | `attention.wq` | `attention.wq` | `attention.qkv_linear.wq`; its states may be in `wqkv`, by key head |
| head | `output` | `output` | `lm_head` |
| `train_state` | step | step, ntokens_seen | step, ntokens_seen |

Optimizer states are `optimizer.state.NAME.exp_avg` in all of them, and settings `optimizer.param_groups.NAME.lr`. Llama
3 rotates the pairs (0, 1), (2, 3) ... of a head, and transformers pairs the halves of a head; Qwen 3 does as
transformers (torchtitan/models/*/state_dict_adapter.py). The checkpoint has neither the model's settings nor the
precision.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.adopt.dcp.files import METADATA, DcpFiles
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission, Shape
from pretrain.extensions.adopt.mapping import precision_of_dtype
from pretrain.extensions.adopt.megatron.names import BY_HEAD, merge_qkv
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.layers.rope import inverse_frequencies

_ADAM = ("exp_avg", "exp_avg_sq")
_OUTSIDE = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight", "lm_head.weight": "lm_head.weight"}
_IN_LAYER = {
    **{f"attention.{prefix}w{part}": f"self_attn.{part}_proj" for part in "qkv" for prefix in ("", "qkv_linear.")},
    "attention.wo": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_QKV = re.compile(r"(layers\.\d+\.attention\.qkv_linear)\.w([qkv])\.(weight|bias)")
_PAIRED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_proj\.(weight|bias)")
_FREQUENCIES = "freqs_cis"  # buffer of 0.1: the rotation of each position, complex [positions, head_size / 2]
_INTERLEAVED = {"llama": True, "qwen3": False}  # model_type -> whether torchtitan's model rotates neighbours
_SAME = 1e-3  # relative difference of rotary frequencies, radians
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."
_OTHERS = ("optimizer.", "lr_scheduler.", "train_state.", "dataloader.")


def is_torchtitan(files: DcpFiles) -> bool:
    """Return whether the names of the tensors are torchtitan's."""
    return any(f"{prefix}tok_embeddings.weight" in files.tensors for prefix in ("", "model."))


def read(files: DcpFiles, config: Mapping[str, Any] | None) -> ForeignRun:
    """Return what a checkpoint holds. Raises ConfigError."""
    if config is None:
        raise ConfigError(str(files.folder), problem="a checkpoint of torchtitan does not describe its model",
                          remedy="name the config.json of the same model by --model")
    model = model_config_from(dict(config), "config.json")
    if model.architecture not in _INTERLEAVED:
        raise ConfigError("--model", found=f"model_type {model.architecture}", expected=" or ".join(_INTERLEAVED)
                          + ": torchtitan's names of other models are not known to this program")
    tensors = _Tensors(files, model, _names(files, model))
    tensors.check_tied_head()
    notes = [*tensors.check_frequencies(), "torchtitan does not record in which precision it computes, nor the "
             "clipping of gradients: set both in the DeepSpeed JSON"]
    states, omissions = _states(files, tensors)
    groups = {name: _settings(files, tensors.names[name]) for name in tensors.shapes} if states else {}
    optimizer, more = _optimizer(files, groups) if states else ({}, [])
    steps = {float(files.read(key)) for key in files.tensors if key.startswith(_STATE) and key.endswith(".step")}
    if len(steps) > 1:
        raise ConfigError(f"{files.folder}: optimizer.state", found=f"the steps {sorted(steps)[:3]}",
                          expected="one number of steps for all parameters")
    step = _value(files, "train_state.step", None)
    if type(step) is not int or step < 0:
        raise ConfigError(f"{files.folder}: train_state.step", found=step, expected="a number of steps; a last "
                          "checkpoint of weights alone has none", remedy="use a checkpoint with all states "
                          "(last_save_model_only = false)")
    tokens, ranks = _value(files, "train_state.ntokens_seen", None), _value(files, "dataloader.world_size", None)
    counted = type(tokens) is int and type(ranks) is int and tokens > 0 and ranks > 0
    return ForeignRun(
        program="torchtitan", folder=files.folder, files=files.files, config=dict(config), shapes=tensors.shapes,
        read=tensors.read, states=states, step=step, optimizer_step=max(steps, default=0.0), optimizer=optimizer,
        weight_decay={name: float(values["weight_decay"]) for name, values in groups.items()
                      if "weight_decay" in values},
        schedule=_schedule(files, groups),
        consumed_tokens=tokens * ranks if counted else None, precision=tensors.precision,
        omissions=tuple(omissions), notes=(*notes, *more))


def _names(files: DcpFiles, model: ModelConfig) -> dict[str, str]:
    """Return transformers' name -> torchtitan's of each weight. Raises ConfigError for a name that is not known."""
    found = {}
    for key in files.tensors:
        if key.startswith(_OTHERS):
            continue
        name = key.removeprefix("model.")
        inside = _LAYER.fullmatch(name)
        theirs = _OUTSIDE.get(name)
        if inside and inside[2] in _IN_LAYER:
            theirs = f"model.layers.{inside[1]}.{_IN_LAYER[inside[2]]}.{inside[3]}"
        if theirs is not None:
            found[theirs] = name
        elif name != _FREQUENCIES:
            raise ConfigError(f"{files.folder / METADATA}: {shorten(key)}", problem="this program does not know what "
                              f"it is in a {model.architecture} model of transformers",
                              remedy="export the weights for transformers, and use --init_from")
    if others := [key for key in files.objects if not key.startswith(_OTHERS)]:
        raise ConfigError(f"{files.folder / METADATA}: {shorten(others[0])}", problem="this program does not know this "
                          "value of a torchtitan checkpoint")
    return found


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a checkpoint, under transformers' names."""

    files: DcpFiles
    model: ModelConfig
    names: dict[str, str]  # transformers' name -> torchtitan's, without "model."

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each parameter; of a tied head, none."""
        return {name: self.files.tensors[self._key(fqn)].shape for name, fqn in self.names.items()
                if not (self.model.tie_word_embeddings and name == "lm_head.weight")}

    @property
    def precision(self) -> str:
        """The dtype of the weights."""
        dtypes = {self.files.tensors[self._key(fqn)].dtype for fqn in self.names.values()}
        return precision_of_dtype(dtypes.pop()) if len(dtypes) == 1 else "fp32"

    def read(self, name: str, state: str) -> torch.Tensor:
        """Return a state of a parameter: see ForeignRun."""
        fqn = self.names[name]
        tensor = (self.files.read(self._key(fqn)) if state == "fp32" else self._state(fqn, state)).float()
        if _INTERLEAVED[self.model.architecture] and _PAIRED.fullmatch(name):
            size, rest = self.model.head_size, tensor.shape[1:]
            tensor = tensor.view(-1, size // 2, 2, *rest).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def state_keys(self, fqn: str, state: str) -> tuple[str, bool]:
        """Return the key of a parameter's optimizer state, and whether it is that of the fused matrix of qkv.

        A tied matrix has its states under the name of the embedding. Raises ConfigError if the state is missing.
        """
        if f"{_STATE}{fqn}.{state}" in self.files.tensors:
            return f"{_STATE}{fqn}.{state}", False
        fused = _QKV.fullmatch(fqn)
        key = f"{_STATE}{fused[1]}.wqkv.{fused[3]}.{state}" if fused else ""
        if key not in self.files.tensors:
            raise ConfigError(f"{self.files.folder / METADATA}: {_STATE}{shorten(fqn)}.{state}",
                              problem="the optimizer state is missing", remedy="use another checkpoint")
        return key, True

    def _state(self, fqn: str, state: str) -> torch.Tensor:
        key, is_fused = self.state_keys(fqn, state)
        tensor = self.files.read(key)
        if not is_fused:
            return tensor
        queries, keys = (count * self.model.head_size for count in (self.model.num_heads, self.model.num_kv_heads))
        if len(tensor) != queries + 2 * keys:
            raise ConfigError(f"{self.files.folder / METADATA}: {key}", found=f"{len(tensor)} rows",
                              expected=f"{queries + 2 * keys}, as the config.json says")
        parts = merge_qkv([tensor], self.model, BY_HEAD).split([queries, keys, keys])
        found = _QKV.fullmatch(fqn)
        assert found is not None
        return parts["qkv".index(found[2])]

    def _key(self, fqn: str) -> str:
        return fqn if fqn in self.files.tensors else f"model.{fqn}"

    def check_tied_head(self) -> None:
        """Raise ConfigError if the model ties the head, and the checkpoint has another one."""
        if self.model.tie_word_embeddings and "lm_head.weight" in self.names and not torch.equal(
                self.read("lm_head.weight", "fp32"), self.read("model.embed_tokens.weight", "fp32")):
            raise ConfigError("--model: tie_word_embeddings", problem=f"it is true, and {self.names['lm_head.weight']} "
                              f"of {self.files.folder} differs from tok_embeddings.weight", remedy="set it to false")

    def check_frequencies(self) -> list[str]:
        """Compare the rotary frequencies of the checkpoint with the config.json's; without any, return a note.

        Raises ConfigError if they differ.
        """
        key = self._key(_FREQUENCIES)
        if key not in self.files.tensors:
            return ["torchtitan does not record its rotary frequencies: rope_theta and rope_scaling of the config.json "
                    "must be those of the run (its llama3 scales them as Llama 3.1 since version 0.2)"]
        ours, theirs = inverse_frequencies(self.model), torch.angle(self.files.read(key)[1])
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=_SAME):
            raise ConfigError(f"{self.files.folder}: {key}", found=f"rotary frequencies from {theirs[0]:.4g} to "
                              f"{theirs[-1]:.4g}", expected=f"{ours[0]:.4g} to {ours[-1]:.4g}, as rope_theta and "
                              "rope_scaling of the config.json say",
                              remedy="name the config.json of this run by --model")
        return []


def _states(files: DcpFiles, tensors: _Tensors) -> tuple[tuple[str, ...], list[Omission]]:
    """Return the optimizer states that a resume needs, and why there are none. Raises ConfigError if one is missing."""
    kinds = {key.rpartition(".")[2] for key in files.tensors if key.startswith(_STATE)}
    if not kinds:
        return (), [Omission("optimizer", "the checkpoint has weights alone")]
    if kinds != {*_ADAM, "step"}:
        return (), [Omission("optimizer", f"its states are {', '.join(sorted(kinds))}, and not those of Adam")]
    expected = {tensors.state_keys(tensors.names[name], state)[0] for name in tensors.shapes for state in _ADAM}
    unknown = sorted(key for key in files.tensors
                     if key.startswith(_STATE) and not key.endswith(".step") and key not in expected)
    if unknown and not (tensors.model.tie_word_embeddings and all(
            key.startswith(f"{_STATE}{tensors.names.get('lm_head.weight')}.") for key in unknown)):
        raise ConfigError(f"{files.folder / METADATA}: {shorten(unknown[0])}",
                          problem="it belongs to none of the weights")
    return _ADAM, []


def _settings(files: DcpFiles, fqn: str) -> dict[str, Any]:
    """Return the settings of the optimizer for one parameter."""
    fused = _QKV.fullmatch(fqn)
    prefixes = [f"{_GROUPS}{fqn}.", *([f"{_GROUPS}{fused[1]}.wqkv.{fused[3]}."] if fused else [])]
    wanted = ("lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
    for prefix in prefixes:
        found = {key: _value(files, prefix + key, None) for key in wanted if prefix + key in files.objects}
        if found:
            return found
    return {}


def _optimizer(files: DcpFiles, groups: Mapping[str, dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return type and parameters of the optimizer, and notes. Raises ConfigError if parameters have different ones."""
    first: dict[str, Any] = {}
    for name, values in groups.items():
        same = {key: value for key, value in values.items() if key not in ("lr", "initial_lr", "weight_decay")}
        if same != {key: value for key, value in (first or same).items() if key in same} or same.get("amsgrad") \
                or same.get("maximize"):
            raise ConfigError(f"{files.folder}: {_GROUPS}{name}", found=shorten(str(same)), expected="an Adam with the "
                              "same betas and eps for all parameters, without amsgrad and maximize")
        first = first or same
    rates = {float(values.get("initial_lr", values.get("lr", 0.0))) for values in groups.values()}
    if len(rates) > 1 or not first.get("betas") or "eps" not in first:
        raise ConfigError(f"{files.folder}: {_GROUPS}lr",
                          found=f"the rates {sorted(rates)[:3]}, and {shorten(str(first))}",
                          expected="one learning rate, betas and eps for all parameters")
    decoupled = first.get("decoupled_weight_decay")
    decays = [float(values["weight_decay"]) for values in groups.values() if "weight_decay" in values]
    params = {"lr": rates.pop(), "betas": [float(beta) for beta in first["betas"]], "eps": float(first["eps"]),
              "weight_decay": max(decays, default=0.0)}
    notes = ["torch before 2.7 does not record whether weight decay is decoupled: it is taken for AdamW, torchtitan's "
             "default"] if decoupled is None and params["weight_decay"] else []
    return {"type": "Adam" if decoupled is False else "AdamW", "params": params}, notes


def _schedule(files: DcpFiles, groups: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what is recorded of the schedule. It was advanced before the save, so that the rate is the next one."""
    epoch = _value(files, "lr_scheduler.last_epoch", None)
    rates = [float(values["lr"]) for values in groups.values() if "lr" in values]
    return {**({"last_step": epoch} if type(epoch) is int else {}), **({"next_rate": max(rates)} if rates else {})}


def _value(files: DcpFiles, name: str, default: Any) -> Any:
    """Return a value that is no tensor, or a tensor with one number as a number."""
    if name in files.tensors:
        return files.read(name).item() if not files.tensors[name].shape else default
    value = files.value(name) if name in files.objects else default
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
