"""Find the parts of transformers' model: embedding, list of decoder layers, what lies before and after it, and head.

Nothing is guessed from names. The model's own forward function is executed with random token ids (skeleton.py), every
module with parameters outside of a list of modules returns random values of the right shape, and every module of the
list returns new random hidden states. The list is the one of the decoder layers if each of its modules is called
exactly once, in order, with the hidden states that the module before it returned.

The other arguments of the decoder layers (masks, rotary tables ...) are compared between runs with other random values.
Those that depend on the token ids are carried from layer to layer (runner.py). None may depend on the hidden states.
"""

import inspect
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pretrain.extensions.wrapped.runner import Carried, Handler, Runner

# How a decoder layer may return the hidden states, in the order in which this is tried.
_ITEMS = (0, 1, 2, 3)  # 0: as a tensor, otherwise as the first item of a tuple of this length
_BATCH, _LENGTH = 2, 8  # shape of the random token ids


class UnknownPartsError(Exception):
    """The parts of a model are not found. The message says what was looked for and what was found."""


@dataclass(frozen=True)
class Parts:
    """Paths of modules in transformers' model, in the order of their calls."""

    embedding: str  # module of the tokens' embedding
    prologue: tuple[str, ...]  # modules with parameters, between the embedding and the first decoder layer
    changes_embedding: bool  # whether the first decoder layer gets something else than the output of the embedding
    blocks: tuple[str, ...]  # decoder layers
    epilogue: tuple[str, ...]  # modules with parameters, between the last decoder layer and the head: the final norm
    head: str
    tied: bool  # whether the embedding and the head share their matrix
    returned_items: int  # 0: a decoder layer returns a tensor; otherwise the length of a tuple that begins with it
    plain_head: bool  # whether the logits are what the head returns: no scale, no soft-capping
    hidden_shape: tuple[int, ...]  # after batch and positions: several streams have 2 dimensions
    carried: tuple[Carried, ...]  # the last used one first

    @property
    def watched(self) -> tuple[str, ...]:
        """Paths of all modules that have parameters, each as a whole."""
        return (self.embedding, *self.prologue, *self.blocks, *self.epilogue, self.head)

    def returned(self, hidden_BTD: torch.Tensor) -> Any:
        """Return hidden states as a decoder layer returns them."""
        return _returned(hidden_BTD, self.returned_items)


def _returned(hidden_BTD: torch.Tensor, items: int) -> Any:
    return (hidden_BTD, *(None,) * (items - 1)) if items else hidden_BTD


@dataclass
class _Calls:
    """The calls of modules in one run of the forward function."""

    order: list[str] = field(default_factory=list)  # paths of the called modules
    # the hidden states of decoder layers, and all arguments of other modules
    entered: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)  # all others of decoder layers, by name
    returned: dict[str, Any] = field(default_factory=dict)
    logits: Any = None


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the first argument of a call of `module`, which are the hidden states, and all others by their names."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise UnknownPartsError(f"{type(module).__name__}.forward takes *{name}")
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    first = next(iter(named), None)
    return (None, {}) if first is None else (named.pop(first), named)


def find_parts(model: Any) -> Parts:
    """Return the parts of a skeleton. Raises UnknownPartsError."""
    candidates = [(sum(each.numel() for each in module.parameters()), path)
                  for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
                  and not any(isinstance(model.get_submodule(parent), nn.ModuleList) for parent in _parents(path))]
    candidates = sorted((each for each in candidates if each[0]), reverse=True)
    if not candidates:
        raise UnknownPartsError("a list of decoder layers (torch.nn.ModuleList) is needed; the model has none")
    reasons = []
    for _, path in candidates:
        try:
            return _parts_around(model, path)
        except UnknownPartsError as error:
            reasons.append(f"{path}: {error}")
    raise UnknownPartsError(reasons[0])


def _parents(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain `path`, from the innermost one to "", the model."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _parts_around(model: Any, list_path: str) -> Parts:
    """Return the parts if the modules of `list_path` are the decoder layers."""
    blocks = tuple(f"{list_path}.{index}" for index in range(len(model.get_submodule(list_path))))
    outside = tuple(_units(model, list_path))
    embedding, head = _vocabulary_paths(model, outside)
    calls, items = _observe(model, blocks, outside)
    in_training = _run(model, blocks, outside, items, training=True)
    if problem := _problem_with_order(in_training, blocks):
        raise UnknownPartsError(f"with dropout, {problem}")
    first, last = calls.order.index(blocks[0]), calls.order.index(blocks[-1])
    before, after = calls.order[:first], calls.order[last + 1:]
    for path in outside:
        if calls.order.count(path) != 1:
            raise UnknownPartsError(f"{path} is called {calls.order.count(path)} times; expected once" if
                                    path in calls.order else f"{path} is not called for text, but has parameters")
    if between := [path for path in calls.order[first:last] if path not in blocks]:
        raise UnknownPartsError(f"{between[0]} is called between decoder layers")
    if before[:1] != [embedding]:
        raise UnknownPartsError(f"the embedding {embedding} must be the first module with parameters that is called; "
                                f"the calls before the decoder layers are {', '.join(before) or 'none'}")
    if after[-1:] != [head]:
        raise UnknownPartsError(f"the head {head} must be the last module with parameters that is called; the calls "
                                f"after the decoder layers are {', '.join(after) or 'none'}")
    carried = _find_carried(calls, _run(model, blocks, outside, items, seed=1),
                            _run(model, blocks, outside, items, block_seed=1), blocks)
    tied = _check_vocabulary(model, embedding, head)
    _check_shared(model, (*outside, *blocks), (embedding, head) if tied else ())
    hidden = in_training.entered[blocks[0]]  # dropout changes it in training only
    return Parts(embedding, tuple(before[1:]), bool(carried) or hidden is not in_training.returned[embedding], blocks,
                 tuple(after[:-1]), head, tied, items, calls.logits is calls.returned[head], tuple(hidden.shape[2:]),
                 carried)


def _units(model: Any, list_path: str) -> Iterator[str]:
    """Yield the paths of the topmost modules with parameters that neither contain the list nor belong to it."""
    for parent_path in reversed(list(_parents(list_path))):
        parent = model.get_submodule(parent_path)
        if own := next((name for name, _ in parent.named_parameters(recurse=False)), None):
            raise UnknownPartsError(f"the parameter {parent_path}.{own}".replace(" .", " ") +
                                    " belongs to the module that contains the decoder layers; expected parameters of "
                                    "modules that are called before or after them")
        for name, child in parent.named_children():
            path = f"{parent_path}.{name}".removeprefix(".")
            if path != list_path and not list_path.startswith(f"{path}."):
                yield from _callable_units(path, child)


def _callable_units(path: str, module: nn.Module) -> Iterator[str]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for name, child in module.named_children():
            yield from _callable_units(f"{path}.{name}", child)
    elif next(module.parameters(), None) is not None:
        yield path


def _vocabulary_paths(model: Any, outside: tuple[str, ...]) -> tuple[str, str]:
    """Return the paths of the token embedding and of the head, as the model names them itself."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = []
    for what, module in (("token embedding", model.get_input_embeddings()), ("head", model.get_output_embeddings())):
        path = paths.get(id(module), "")
        if path not in outside:
            unit = next((each for each in outside if path.startswith(f"{each}.")), "")
            raise UnknownPartsError(f"the model has no {what}" if not path else f"the {what} {path} must be a module "
                                    f"that the model calls by itself; it is a part of {unit or 'another one'}")
        found.append(path)
    if found[0] == found[1]:
        raise UnknownPartsError(f"the head is the same module as the embedding, {found[0]}")
    return found[0], found[1]


def _observe(model: Any, blocks: tuple[str, ...], outside: tuple[str, ...]) -> tuple[_Calls, int]:
    """Run the model once; return the calls, and how decoder layers return the hidden states (_ITEMS)."""
    failure, reason = "", ""
    for items in _ITEMS:
        try:
            calls = _run(model, blocks, outside, items)
        except UnknownPartsError as error:
            failure = failure or str(error)
        except Exception as error:  # the model's code got another kind of value than it expects
            failure = failure or (f"the forward function failed with {type(error).__name__}: {str(error)[:200]}"
                                  f"{_place(model, error)}")
        else:
            problem = _problem_with_order(calls, blocks)
            if not problem:
                return calls, items
            reason = reason or problem
    raise UnknownPartsError(reason or failure)


def _place(model: Any, error: Exception) -> str:
    """Return the latest line of the model's own file that the exception passed."""
    file = inspect.getfile(type(model))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({os.path.basename(file)}:{lines[-1]})" if lines else ""


def _problem_with_order(calls: _Calls, blocks: tuple[str, ...]) -> str:
    """Return why the calls are not those of a plain stack of layers; "" if they are."""
    called = [path for path in calls.order if path in blocks]
    if called != list(blocks):
        return (f"each of the {len(blocks)} modules must be called exactly once, in order; "
                f"called were {', '.join(called[:8]) or 'none'}{' ...' if len(called) > 8 else ''}")
    hidden = calls.entered[blocks[0]]
    if not torch.is_tensor(hidden) or hidden.shape[:2] != (_BATCH, _LENGTH) or hidden.dim() < 3:
        return (f"{blocks[0]} must get hidden states [batch, positions, size] as first argument; it gets "
                f"{list(hidden.shape)} for {_BATCH} samples of {_LENGTH} tokens")
    for before, block in pairwise(blocks):
        if calls.entered[block] is not calls.returned[before]:
            return f"{block} must get the hidden states that {before} returned; it gets something else"
    return ""


def _run(model: Any, blocks: tuple[str, ...], outside: tuple[str, ...], items: int, *,
         seed: int = 0, block_seed: int = 0, training: bool = False) -> _Calls:
    """Run the forward function with random token ids, outputs of modules, and hidden states of decoder layers.

    `block_seed`: of the hidden states. `seed`: of all others.
    """
    runner, calls = Runner(model, (*blocks, *outside)), _Calls()
    generator = torch.Generator().manual_seed(seed + 1000 * block_seed)

    def unit(path: str) -> Handler:
        shapes = runner.shapes_of(path, torch.float32, random=True)

        def handler(*args: Any, **kwargs: Any) -> Any:
            calls.order.append(path)
            calls.entered[path] = (args, kwargs)
            calls.returned[path] = shapes(*args, **kwargs)
            return calls.returned[path]
        return handler

    def block(path: str) -> Handler:
        module = model.get_submodule(path)

        def handler(*args: Any, **kwargs: Any) -> Any:
            hidden, arguments = bound_arguments(module, args, kwargs)
            calls.order.append(path)
            calls.entered[path], calls.arguments[path] = hidden, arguments
            if not torch.is_tensor(hidden):
                raise UnknownPartsError(f"{path} must get hidden states as first argument; it gets "
                                        f"{type(hidden).__name__}")
            calls.returned[path] = torch.randn(hidden.shape, generator=generator, dtype=hidden.dtype)
            return _returned(calls.returned[path], items)
        return handler

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids_BT = torch.randint(1, model.get_input_embeddings().weight.shape[0], (_BATCH, _LENGTH))
        handlers = {path: unit(path) for path in outside} | {path: block(path) for path in blocks}
        calls.logits = runner.run(ids_BT, handlers, training=training)
    return calls


def _find_carried(first: _Calls, other: _Calls, other_blocks: _Calls, blocks: tuple[str, ...]) -> tuple[Carried, ...]:
    """Return the arguments of decoder layers that depend on the tokens, the last used one first.

    Raises UnknownPartsError for an argument that depends on hidden states, or that cannot be carried.

    Args:
        other: run with other token ids and other random values.
        other_blocks: run in which only the outputs of the decoder layers are others.
    """
    uses: dict[int, list[tuple[int, str]]] = {}  # by identity of the tensor
    tensors: dict[int, torch.Tensor] = {}
    for layer, path in enumerate(blocks):
        for name, value in first.arguments[path].items():
            if _same(value, other.arguments[path].get(name)):
                continue
            what = f"the argument {name} of {path} ({type(value).__name__})"
            if not _same(value, other_blocks.arguments[path].get(name)):
                raise UnknownPartsError(f"{what} depends on what decoder layers before it computed; expected masks, "
                                        "positions, or what depends on the tokens alone")
            if not torch.is_tensor(value) or value.dim() < 2 or value.shape[:2] != (_BATCH, _LENGTH):
                raise UnknownPartsError(f"{what} depends on the tokens; expected a tensor [batch, positions, ...]")
            uses.setdefault(id(value), []).append((layer, name))
            tensors[id(value)] = value
    found = [Carried(tuple(tensors[key].shape[2:]), not tensors[key].is_floating_point(), tuple(each))
             for key, each in uses.items()]
    return tuple(sorted(found, key=lambda carried: -carried.last_use))


def _same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.shape == other.shape and one.dtype == other.dtype and \
            torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return isinstance(other, type(one)) and len(one) == len(other) and \
            all(_same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and \
            all(_same(one[key], other[key]) for key in one)
    return bool(one is other or one == other)


def _check_vocabulary(model: Any, embedding: str, head: str) -> bool:
    """Return whether the embedding and the head share their matrix. Raises UnknownPartsError for other parameters."""
    names = [name for name, _ in model.get_submodule(embedding).named_parameters()]
    if names != ["weight"]:
        raise UnknownPartsError(f"the embedding {embedding} has the parameters {', '.join(names)}; expected weight")
    names = [name for name, _ in model.get_submodule(head).named_parameters()]
    tied = getattr(model.get_submodule(head), "weight", None) is model.get_submodule(embedding).weight
    if type(model.get_submodule(head)) is not nn.Linear or (tied and names != ["weight"]):
        raise UnknownPartsError(f"the head {head} is a {type(model.get_submodule(head)).__name__} with the parameters "
                                f"{', '.join(names)}; expected torch.nn.Linear" + (", tied without bias" * tied))
    return tied


def _check_shared(model: Any, paths: tuple[str, ...], tied: tuple[str, ...]) -> None:
    """Raise UnknownPartsError if two parts share a parameter, other than the tied embedding and head."""
    owner: dict[int, str] = {}
    for path in paths:
        for name, parameter in model.get_submodule(path).named_parameters():
            other = owner.setdefault(id(parameter), path)
            if other != path and not {other, path} <= {*tied}:
                raise UnknownPartsError(f"{path}.{name} is also a parameter of {other}")
