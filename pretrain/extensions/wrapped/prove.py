"""Proof that a model trains as transformers' own does: loss and every gradient, in fp32, on a tiny copy of its config.

Compared are the plain module and the layers of a pipeline run in order, with and without recomputation, with
`model(input_ids=..., labels=...)` of transformers for the same weights.

A gradient differs if the norm of the difference is more than 1e-5 of the gradient's norm, and more than 1e-7 of the
norm of the complete gradient, which is the precision of fp32: gradients that are zero in exact arithmetic, such as
those of the biases of keys, consist of rounding errors.
"""

import inspect
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import nn

from pretrain.errors import ConfigError, shorten
from pretrain.extensions.wrapped.decoder import decoder_of
from pretrain.extensions.wrapped.read import wrapped_config
from pretrain.extensions.wrapped.tiny import BATCH, TOKENS, tiny_copies, tiny_copy
from pretrain.model.description import ModelConfig
from pretrain.model.families import FAMILIES
from pretrain.model.hf_weights import to_transformers
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import CausalLM, as_module, build_specs
from pretrain.model.layers.vocabulary import Labels
from pretrain.model.own_models import own_model, transformers_config
from pretrain.model.recompute import Recompute
from pretrain.model.run_layers import run_layers

TOLERANCE = 1e-5
_PRECISION = 1e-7  # that of fp32: a difference that counts is larger than this part of the complete gradient's norm
_BF16_TOLERANCE = 0.05  # difference of the loss in bf16, relative to fp32
_CHANGED_TOKENS = 5  # at the end of the samples, for the test of causality
_IGNORED = -100  # label without loss, of transformers
Tensors = dict[str, torch.Tensor]


class UnprovenError(Exception):
    """A model does not train as transformers' own does. The message says where they differ."""


@dataclass(frozen=True)
class Proof:
    """The result of a proof that succeeded."""

    loss: float  # loss of transformers' model
    difference: float  # largest relative difference of a gradient
    num_layers: int
    num_gradients: int
    without_gradient: tuple[str, ...]  # transformers' names of parameters that the loss does not depend on
    bf16_problem: str  # why the model does not train in bf16; "" if it does


@dataclass(frozen=True)
class _Results:
    loss: float
    gradients: Tensors  # under transformers' names


def prove_wrapped(config: ModelConfig, precision: str = "fp32") -> Proof:
    """Prove the tiny copy of a wrapped config. Raises ConfigError for a model that differs, and if there is no copy.

    `precision`: of the run: fp32, bf16 or fp16.
    """
    proof = _first_proof(config)
    if precision != "fp32" and proof.bf16_problem:
        raise ConfigError(f"the model_type {config.architecture}", problem="a tiny copy of its config trains in fp32, "
                          f"and not in bf16: {proof.bf16_problem}", remedy="train it in fp32")
    return proof


def _first_proof(config: ModelConfig) -> Proof:
    """Return the proof of the first tiny copy that has one. Raises ConfigError with the reason of the first copy."""
    first_error: ConfigError | None = None
    theirs = transformers_config(config.hf_config)  # not that of the model, which may be of its text part alone
    own = own_model(theirs.model_type)
    for tiny in tiny_copies(theirs, None if own is None else own.model_class):
        try:
            return prove(_config_of(tiny, theirs.model_type))
        except UnprovenError as error:
            first_error = first_error or ConfigError(
                f"the model_type {config.architecture}", problem=f"on a tiny copy of its config, {error}",
                remedy="such a model cannot be trained here")
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error from None


def tiny_config(config: Any) -> ModelConfig:
    """Return the first tiny copy of a transformers config. Raises ConfigError."""
    own = own_model(config.model_type)
    return _config_of(tiny_copy(config, None if own is None else own.model_class), config.model_type)


def _config_of(tiny: Any, model_type: str) -> ModelConfig:
    values = json.loads(tiny.to_json_string(use_diff=False))
    return wrapped_config({**values, "model_type": model_type}, "its tiny copy")


def prove(config: ModelConfig) -> Proof:
    """Compare the model of a config with transformers' own. Raises UnprovenError."""
    try:
        return _prove(config)
    except (ConfigError, UnprovenError):
        raise
    except Exception as error:  # in the code of transformers or of the user
        raise UnprovenError(f"it fails with {_error_text(error)}") from error


def _error_text(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {shorten(' '.join(str(error).split()))} " \
           f"({os.path.basename(place.filename)}:{place.lineno})"


def _prove(config: ModelConfig) -> Proof:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = as_module(config)
        initialize_parameters(module, config, seed=0)
        _perturb(module)
        reference = _reference(config, dict(module.named_parameters()))
        ids_BT = _token_ids(config)
        _check_reference(reference, ids_BT)
        expected = _train_reference(reference, ids_BT)
        difference = 0.0
        for how, (model, run) in _variants(config, module).items():
            found = _train(config, model, run, ids_BT)
            where = partial(_first_difference, config, reference, model, ids_BT)
            difference = max(difference, _compare(expected, found, how, where))
        problem = _bf16_problem(module, ids_BT, expected.loss)
    unused = tuple(name for name, gradient in expected.gradients.items() if not gradient.any())
    return Proof(expected.loss, difference, config.num_layers, len(expected.gradients), unused, problem)


def _bf16_problem(module: CausalLM, ids_BT: torch.Tensor, loss: float) -> str:
    """Train the plain module in bf16, in which code that mixes dtypes fails. Return what is wrong."""
    try:
        found = _run_plain(module.to(torch.bfloat16), ids_BT)
        found.backward()
    except Exception as error:
        return _error_text(error)
    near = abs(found.item() - loss) <= _BF16_TOLERANCE * loss
    return "" if near else f"the loss is {found.item():.4g}, and in fp32 {loss:.4g}"


def _token_ids(config: ModelConfig) -> torch.Tensor:
    """Return random tokens. Some models treat the padding token in another way, so that it must occur.

    A family of ours trains its embedding, and transformers does not: there it must not occur.
    """
    ids_BT = torch.randint(config.vocab_size, (BATCH, TOKENS))
    padding = config.hf_config.get("pad_token_id")
    if padding is not None and config.implementation.trains_padding_row:
        ids_BT[ids_BT == padding] = padding + 1
    elif padding is not None:
        ids_BT[:, TOKENS // 3] = padding
    return ids_BT


@torch.no_grad()
def _perturb(module: nn.Module) -> None:
    """Add random numbers to the initial weights: zeros would hide errors, small matrices would make them small."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1 if parameter.dim() > 1 else 0.05)
    _without_dropout(module)


def _without_dropout(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0


def _reference(config: ModelConfig, parameters: Tensors) -> Any:
    """Return transformers' model with the weights of ours."""
    from transformers import AutoModelForCausalLM

    own = own_model(config.architecture)
    build = AutoModelForCausalLM.from_config if own is None else own.model_class._from_config
    torch.manual_seed(0)
    model = build(transformers_config(config.hf_config), dtype=torch.float32)
    named = dict(model.named_parameters())
    state = to_transformers({name: value.detach() for name, value in parameters.items()}, config)
    if missing := named.keys() - state.keys():
        raise UnprovenError(f"the parameter {min(missing)} belongs to no layer")
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(state[name])
    _without_dropout(model)
    model.config.use_cache = False
    return model.train()


def _check_reference(reference: Any, ids_BT: torch.Tensor) -> None:
    """Raise UnprovenError for a model that is random, or in which a token sees later ones."""
    with torch.no_grad():
        one, same = (reference(input_ids=ids_BT).logits for _ in range(2))
        other_ids_BT = ids_BT.clone()
        other_ids_BT[:, -_CHANGED_TOKENS:] = ids_BT[:, -_CHANGED_TOKENS:].flip(1).roll(1, 0)
        other = reference(input_ids=other_ids_BT).logits
    if not torch.isfinite(one).all():
        raise UnprovenError("transformers' model computes logits that are not finite")
    if _difference(one, same) > TOLERANCE:
        raise UnprovenError("transformers' model computes other logits each time, without any dropout")
    if one.shape[1] != TOKENS:
        raise UnprovenError(f"transformers' model computes logits of {one.shape[1]} positions for {TOKENS} tokens")
    if _difference(one[:, :-_CHANGED_TOKENS], other[:, :-_CHANGED_TOKENS]) > TOLERANCE:
        raise UnprovenError("logits depend on later tokens, so that the model is no decoder (some need "
                            "`\"is_decoder\": true`)")


def _train_reference(reference: Any, ids_BT: torch.Tensor) -> _Results:
    """Compute transformers' loss. Its labels are the tokens; a few models expect them shifted by one position.

    The forward function of the user's own model may take no labels: then the loss is the cross-entropy of its logits.
    """
    next_BT = ids_BT.roll(-1, 1)
    next_BT[:, -1] = _IGNORED
    if not {"labels", "kwargs"} & inspect.signature(type(reference).forward).parameters.keys():
        logits_BTV = reference(input_ids=ids_BT).logits
        return _backward(reference, F.cross_entropy(logits_BTV.flatten(0, 1).float(), next_BT.flatten()))
    output = reference(input_ids=ids_BT, labels=ids_BT)
    is_loss_of = {name: _is_near(output.loss, F.cross_entropy(output.logits.flatten(0, 1).float(), labels_BT.flatten()))
                  for name, labels_BT in (("next", next_BT), ("same", ids_BT))}
    if not is_loss_of["next"]:
        if not is_loss_of["same"]:
            raise UnprovenError("the loss of transformers' model is not the mean cross-entropy of the tokens")
        output = reference(input_ids=ids_BT, labels=next_BT)
    return _backward(reference, output.loss)


def _backward(reference: Any, loss: torch.Tensor) -> _Results:
    loss.backward()
    return _Results(loss.item(), {name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
                                  for name, each in reference.named_parameters()})


def _is_near(loss: torch.Tensor, other: torch.Tensor) -> bool:
    return abs(loss.item() - other.item()) <= TOLERANCE * abs(other.item())


def _labels(ids_BT: torch.Tensor) -> Labels:
    """Return the labels and weights of the mean over all tokens that have a next one."""
    weights_BT = torch.full(ids_BT.shape, 1 / (BATCH * (TOKENS - 1)))
    weights_BT[:, -1] = 0.0
    return ids_BT.roll(-1, 1), weights_BT


_Run = Callable[[CausalLM, torch.Tensor], torch.Tensor]


def _run_plain(module: CausalLM, ids_BT: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = module(ids_BT, *_labels(ids_BT))
    return loss


def _run_pipeline(module: CausalLM, ids_BT: torch.Tensor) -> torch.Tensor:
    """Compute the loss as the last pipeline stage does: the head is called a second time, with the labels."""
    hidden_BTD = run_layers(module.layers, ids_BT, None, module.recompute)
    loss: torch.Tensor = module.layers[-1](hidden_BTD, _labels(ids_BT))
    return loss


def _variants(config: ModelConfig, module: CausalLM) -> dict[str, tuple[CausalLM, _Run]]:
    """Return the models that are compared, with equal weights."""
    def pipeline(recompute: Recompute) -> CausalLM:
        layers = CausalLM(build_specs(config, ends_in_loss=True, recompute=recompute), recompute)
        layers.load_state_dict(module.state_dict())
        _without_dropout(layers)
        return layers

    return {"of the plain module": (module, _run_plain), "of the pipeline": (pipeline(Recompute()), _run_pipeline),
            "with recomputation": (pipeline(Recompute(part="blocks")), _run_pipeline)}


def _train(config: ModelConfig, module: CausalLM, run: _Run, ids_BT: torch.Tensor) -> _Results:
    loss = run(module.train(), ids_BT)
    loss.backward()
    gradients = {name: torch.zeros_like(each) if each.grad is None else each.grad
                 for name, each in module.named_parameters()}
    return _Results(loss.item(), to_transformers(gradients, config))


def _compare(expected: _Results, found: _Results, how: str, where: Callable[[], str]) -> float:
    """Return the largest difference of a gradient. Raises UnprovenError if one is too large. `where`: layer."""
    floor = _PRECISION / TOLERANCE * sum(float(each.square().sum()) for each in expected.gradients.values()) ** 0.5
    differences = {name: _difference(each, found.gradients[name], floor) for name, each in expected.gradients.items()}
    if not abs(found.loss - expected.loss) <= TOLERANCE * abs(expected.loss):
        raise UnprovenError(f"the loss {how} is {found.loss:.7g} and transformers' own is {expected.loss:.7g}; "
                            f"{where()}")
    if wrong := [name for name, difference in differences.items() if not difference <= TOLERANCE]:
        # the backward pass comes to the last of them first
        raise UnprovenError(f"{len(wrong)} of {len(differences)} gradients {how} differ from transformers' own; in the "
                            f"backward pass the first is {wrong[-1]}, by {differences[wrong[-1]]:.1e} of its norm; "
                            f"{where()}")
    return max(differences.values())


def _difference(one: torch.Tensor, other: torch.Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, relative to the norm of `one`, which counts as at least `floor`."""
    norm = max(float(one.norm()), floor)
    return float((one - other).norm()) / norm if norm else float(other.norm())


def _first_difference(config: ModelConfig, reference: Any, module: CausalLM, ids_BT: torch.Tensor) -> str:
    """Name the first layer whose output differs from the one in transformers' model."""
    if config.architecture in FAMILIES:
        return "the layers of a family of ours have other outputs, which are not compared"
    theirs: Tensors = {}
    blocks = decoder_of(config).parts.blocks

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            theirs[path] = _hidden(output).detach().clone()
        return record

    hooks = [reference.get_submodule(path).register_forward_hook(recorder(path)) for path in blocks]
    with torch.no_grad():
        reference(input_ids=ids_BT)
    for hook in hooks:
        hook.remove()
    for path, x_BTD in zip(blocks, _outputs(config, module, ids_BT), strict=True):
        if (difference := _difference(theirs[path], x_BTD)) > TOLERANCE:
            return f"the first layer whose output differs is {path}, by {difference:.1e} of its norm"
    return "the outputs of all decoder layers are equal"


def _hidden(output: Any) -> torch.Tensor:
    """Return the hidden states of what a decoder layer returned."""
    hidden: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return hidden


@torch.no_grad()
def _outputs(config: ModelConfig, module: CausalLM, ids_BT: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the output of each decoder layer of ours."""
    x = ids_BT
    for description, layer in zip(config.layers(), module.layers, strict=True):
        if description.kind == "head":
            return
        x = layer(x)
        if description.kind == "block":
            parts = decoder_of(config).parts
            yield x[..., :prod(parts.hidden_shape)].unflatten(2, parts.hidden_shape) if parts.carried else x
