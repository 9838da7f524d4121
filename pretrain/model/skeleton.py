"""Skeletons: models of transformers without memory for parameters.

A skeleton is the complete causal language model of a config: its parameters are on torch's meta device (shapes without
memory), its buffers (such as rotary frequencies) are real.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_LARGE = 2**26  # elements: larger tensors are parameters, and never have memory
_CONSTRUCTORS = frozenset((torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn))


class _LargeOnMeta(TorchFunctionMode):
    """Creates large tensors on the meta device: all experts of a layer can have more elements than fit into memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            size = args[0] if args and isinstance(args[0], (tuple, list)) else args or kwargs.get("size", ())
            if math.prod(size) > _LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextlib.contextmanager
def parameters_on_meta(real: Container[int] = ()) -> Iterator[None]:
    """Create parameters without memory, and buffers with their values. Tied parameters remain one object.

    Constructors of transformers compute the frequencies of rotary positions, which are in no checkpoint. Under
    torch.device("meta") they would be lost.

    Each parameter gets an attribute `registration`, its number in the order of construction. Those of `real` keep
    their memory.
    """
    register, number = nn.Module.register_parameter, itertools.count()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is None or hasattr(parameter, "registration"):
            return
        parameter.registration = next(number)  # type: ignore[attr-defined]
        if parameter.device.type != "meta" and parameter.registration not in real:  # type: ignore[attr-defined]
            moved = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            moved.__dict__.update(parameter.__dict__)
            module._parameters[name] = moved

    setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010 (mypy forbids to assign a method)
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def create_skeleton(config: Any, model_class: Any = None, *, dtype: torch.dtype = torch.float32,
                    real: Container[int] = (), seed: int = 0) -> Any:
    """Build the model of a transformers config, in evaluation mode. `model_class` None: the class of its model_type.

    Attention is torch's scaled_dot_product_attention, or the model's own operators if it does not support that one.

    Args:
        real: registration numbers of the parameters that keep their memory and initial values.
        seed: of these values, and of random buffers.
    """
    from transformers import AutoModelForCausalLM

    build = AutoModelForCausalLM.from_config if model_class is None else model_class._from_config
    config = copy.deepcopy(config)
    config.use_cache = False
    with parameters_on_meta(real), contextlib.nullcontext() if real else _LargeOnMeta(), \
            torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = build(copy.deepcopy(config), attn_implementation="sdpa", dtype=dtype)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model = build(config, attn_implementation="eager", dtype=dtype)
    return model.eval()
