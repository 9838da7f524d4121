"""The optimizers and schedulers of a DeepSpeed 0.19.8 JSON, one row each, without importing deepspeed."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrain.config.ds_json.schema import Key, Tree
from pretrain.errors import ConfigError
from pretrain.own_code import own_function

_RATE = Key("number", low=0, auto=True)
_FRACTION = Key("number", low=0, high=1)
# Its square is a normal number in fp32: smaller ones are 0 where denormals are flushed. A weight without a gradient,
# such as those of unused tokens, is updated by 0 / eps.
SMALLEST_EPS = 1.1e-19
_SMALL = Key("number", low=SMALLEST_EPS, auto=True)
_DECAY = Key("number", low=0, auto=True)
_BETAS = Key("pair", low=0, high=0.999999, auto=True)
_BOOL = Key("bool")
_OWN_PARAMS = {"lr": _RATE, "weight_decay": _DECAY, "eps": _SMALL, "betas": _BETAS}
_NO_CLIPPING = Key(rejected='DeepSpeed rejects it; use "gradient_clipping" at the top level')
_NO_AMSGRAD = Key(rejected="DeepSpeed's optimizers do not have it; remove the key")

_ADAM: Tree = {
    "lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _BOOL,
    "amsgrad": _NO_AMSGRAD, "adam_w_mode": _BOOL, "torch_adam": _BOOL, "fp32_optimizer_states": _BOOL,
    "set_grad_none": _BOOL, "foreach": Key("bool", null=True), "fused": Key("bool", null=True),
    "max_grad_norm": _NO_CLIPPING,
}


@dataclass(frozen=True)
class Optimizer:
    """One "optimizer.type" of the JSON: its parameters and states, and where it works."""

    name: str  # torch.optim's names are case-sensitive, the others are not
    params: Tree
    states: int = 2  # tensors of a parameter's size that it keeps
    states_of_params: tuple[str, ...] = ()  # parameters that each add such a tensor, unless they are 0 or false
    family: str = ""  # name for all its classes in checkpoints, which have the same states; "": its name
    classes: tuple[str, ...] = ()  # names of its classes, if they are not the family's
    elementwise: bool = False  # updates a weight from its own gradient and states: a part of a matrix is enough
    states_in_blocks: bool = False  # a state's blocks of elements cannot be divided: no resume in another layout
    on_cpu: bool = False  # DeepSpeed has it for the CPU, which offload_optimizer needs
    tested_with_zero: bool = False  # DeepSpeed accepts it with ZeRO
    is_compiled: bool = False  # its CUDA operator must be compiled, and torch has no substitute
    scale_free: bool = False  # its update does not depend on the gradient's size (arXiv 2203.03466, B.3): muP works
    from_torch: bool = False  # a class of torch.optim, without a fused kernel
    own: Callable[..., Any] | None = None  # the class of the user's code
    since: str = ""  # first version of DeepSpeed with which it is supported; "": all

    @property
    def divisible(self) -> bool:
        """A resume in another layout can divide its states, at any element."""
        return self.elementwise and not self.states_in_blocks


def _torch(name: str, params: Tree, *, elementwise: bool = True, states: int = 2,
           states_of_params: tuple[str, ...] = ()) -> Optimizer:
    """Return the row of a class of torch.optim. `params` are those besides "lr" and the implementation flags."""
    flags: Tree = {} if name == "Adafactor" else \
        {"capturable": _BOOL, "differentiable": Key(rejected="nothing differentiates through a step")}
    if name == "SGD":
        del flags["capturable"]
    return Optimizer(name, {"lr": _RATE, "foreach": Key("bool", null=True),
                            "maximize": Key(rejected="the loss is minimized"), **params, "max_grad_norm": _NO_CLIPPING,
                            **flags}, states=states, states_of_params=states_of_params,
                     elementwise=elementwise, from_torch=True)


_FROM_0 = Key("number", low=0)
_ADAM_CLASSES = ("FusedAdam", "DeepSpeedCPUAdam", "AdamW")
# ZeRO gives an optimizer flat parts of the parameters, which changes nothing for elementwise ones (but for the blocks
# of 8-bit states); tests/engine/test_optimizers.py compares the optimizers of torch in all layouts.
_ROWS = (
    Optimizer("Adam", _ADAM, family="Adam", classes=_ADAM_CLASSES, elementwise=True, on_cpu=True,
              tested_with_zero=True, scale_free=True),
    Optimizer("AdamW", _ADAM, family="Adam", classes=_ADAM_CLASSES, elementwise=True, on_cpu=True,
              tested_with_zero=True, scale_free=True),
    Optimizer("AdamW8bit",  # of the package bitsandbytes: engine/optimizer.py
              {"lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "max_grad_norm": _NO_CLIPPING},
              elementwise=True, states_in_blocks=True),
    Optimizer("Lion", {"lr": _RATE, "betas": _BETAS, "weight_decay": _DECAY, "set_grad_none": _BOOL,
                       "fp32_optimizer_states": _BOOL, "max_grad_norm": _NO_CLIPPING},
              states=1, classes=("FusedLion", "DeepSpeedCPULion"), elementwise=True, on_cpu=True,
              tested_with_zero=True, is_compiled=True, scale_free=True),
    Optimizer("Muon", {"lr": _RATE, "momentum": _FRACTION, "weight_decay": _DECAY,
                       "ns_method": Key("str", choices=("gram", "standard")),
                       "muon_lr": Key("number", low=0), "adam_lr": Key("number", low=0), "betas": _BETAS,
                       "eps": _SMALL, "adam_w_mode": _BOOL, "torch_adam": _BOOL, "fp32_optimizer_states": _BOOL,
                       "max_grad_norm": _NO_CLIPPING,
                       "per_head_muon": Key(rejected="the models here have no marked attention heads; remove the "
                                                     "key")},
              # before 0.19.8, Muon ignores the parameter groups and their weight decay
              states=1, on_cpu=True, tested_with_zero=True, since="0.19.8"),
    Optimizer("Lamb", {"lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _BOOL,
                       "eps_inside_sqrt": _BOOL, "max_coeff": Key("number", low=0), "min_coeff": Key("number", low=0),
                       "amsgrad": _NO_AMSGRAD, "max_grad_norm": _NO_CLIPPING}, is_compiled=True),
    Optimizer("Adagrad", {"lr": _RATE, "eps": _SMALL, "weight_decay": _DECAY, "amsgrad": _NO_AMSGRAD,
                          "lr_decay": Key("number", low=0), "initial_accumulator_value": Key("number", low=0),
                          "fp32_optimizer_states": _BOOL, "max_grad_norm": _NO_CLIPPING},
              states=1, classes=("DeepSpeedCPUAdagrad",), elementwise=True, on_cpu=True, tested_with_zero=True),
    _torch("ASGD", {"lambd": _FROM_0, "alpha": _FROM_0, "t0": _FROM_0, "weight_decay": _DECAY}, states=1),
    _torch("Adadelta", {"rho": _FRACTION, "eps": _SMALL, "weight_decay": _DECAY}),
    _torch("Adafactor", {"beta2_decay": Key("number", high=0), "eps": Key("pair", low=0), "d": Key("number", low=1),
                         "weight_decay": _DECAY}, elementwise=False, states=1),  # less in fp32 at ZeRO-0
    _torch("Adamax", {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY}),
    _torch("NAdam", {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "momentum_decay": _FROM_0,
                     "decoupled_weight_decay": _BOOL}),
    _torch("RAdam", {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "decoupled_weight_decay": _BOOL}),
    _torch("RMSprop", {"alpha": _FRACTION, "eps": _SMALL, "weight_decay": _DECAY, "momentum": _FRACTION,
                       "centered": _BOOL}, states=1, states_of_params=("momentum", "centered")),
    _torch("Rprop", {"etas": Key("pair", low=1e-9), "step_sizes": Key("pair", low=0)}),
    _torch("SGD", {"momentum": _FRACTION, "dampening": Key("number"), "weight_decay": _DECAY, "nesterov": _BOOL,
                   "fused": _BOOL}, states=0, states_of_params=("momentum",)),
)
OPTIMIZERS = {row.name.lower(): row for row in _ROWS}  # by Layout.optimizer
KNOWN_NAMES = tuple(row.name for row in _ROWS)
_FAMILIES = {name: row.family or row.name for row in _ROWS for name in row.classes}


def divisible_families() -> tuple[str, ...]:
    """Return the families of the optimizers whose states a resume in another layout can divide."""
    return tuple({row.family or row.name: None for row in OPTIMIZERS.values() if row.divisible})


def import_optimizer(kind: str, where: str) -> Optimizer:
    """Add the optimizer that a DeepSpeed JSON names as my_module:MyOptimizer. Returns its row. Raises ConfigError.

    It is a class with the protocol of torch.optim. `elementwise` is required: whether it updates each weight from its
    own gradient and states alone. Only such states can be divided when a run resumes in another layout. `num_states`
    is the number of tensors of a parameter's size that it keeps, 2 by default, for the prediction of the memory.
    """
    found = own_function(kind, where, "my_module:MyOptimizer")
    name = getattr(found, "__name__", "")
    elementwise, states = getattr(found, "elementwise", None), getattr(found, "num_states", 2)
    if not isinstance(elementwise, bool):
        raise ConfigError(where, problem=f"{name} does not say whether it is elementwise", remedy="add the line "
                          "elementwise = True to the class if each weight is updated from its own gradient and states "
                          "alone, otherwise elementwise = False")
    if name in _FAMILIES and _FAMILIES[name] != kind:
        raise ConfigError(where, problem=f"another optimizer has a class with the name {name}",
                          remedy="rename the class: checkpoints have its name")
    keywords = [each for each in inspect.signature(found).parameters.values()
                if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)][1:]
    params: Tree = {each.name: _OWN_PARAMS.get(each.name, Key()) for each in keywords}
    if "betas" in params and not isinstance(inspect.signature(found).parameters["betas"].default, (list, tuple)):
        params["betas"] = Key()
    if "lr" not in params or not isinstance(states, int):
        raise ConfigError(where, problem=f"{name} has no argument lr" if "lr" not in params else
                          "num_states is no whole number", remedy="an optimizer is made as MyOptimizer(groups, lr=...)")
    row = Optimizer(kind, params, states=states, classes=(name,), elementwise=elementwise, from_torch=True, own=found)
    OPTIMIZERS[kind.lower()], _FAMILIES[name] = row, kind
    return row


def optimizer_params(kind: str) -> Tree | None:
    """Return the parameters of an "optimizer.type"; None if there is no such optimizer."""
    row = OPTIMIZERS.get(kind.lower())
    return None if row is None or (row.from_torch and row.name != kind) else row.params


def optimizer_family(class_name: str) -> str:
    """Return the family of an optimizer class: one name for its fused, CPU and torch implementations."""
    return _FAMILIES.get(class_name, class_name)


TORCH_REJECTED = {
    "LBFGS": "it needs the loss computed several times a step",
    "SparseAdam": "the models have no sparse gradients",
}
DEEPSPEED_REJECTED = {
    "onebitadam": 'DeepSpeed 0.19.8 has no 1-bit optimizers; write type "Adam"',
    "zerooneadam": 'DeepSpeed 0.19.8 has no 1-bit optimizers; write type "Adam"',
    "onebitlamb": 'DeepSpeed 0.19.8 has no 1-bit optimizers; write type "Lamb"',
    "muadam": 'write type "Adam", and give the flag --mup_base_width for muP',
    "muadamw": 'write type "AdamW", and give the flag --mup_base_width for muP',
    "musgd": 'write type "AdamW", and give the flag --mup_base_width for muP, which needs Adam, AdamW or Lion here',
    "fusedadam": 'type "AdamW" is DeepSpeed\'s FusedAdam unless the optimizer is offloaded',
    "cpuadam": 'write type "AdamW" and "zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    "deepspeedcpuadam": 'write type "AdamW" and "zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
}
_RESUME_STEP = Key(rejected="the checkpoint sets the step to resume from; remove the key", neutral=(-1,))
_STEPS = Key("int", low=1, auto=True)
_WARMUP: Tree = {"warmup_num_steps": _STEPS, "warmup_type": Key("str", choices=("log", "linear")),
                 "last_batch_iteration": _RESUME_STEP}
_WARMUP_RATES: Tree = {"warmup_min_lr": _RATE, "warmup_max_lr": _RATE}
SCHEDULERS: dict[str, Tree] = {
    "WarmupLR": {**_WARMUP, **_WARMUP_RATES},
    "WarmupDecayLR": {**_WARMUP, **_WARMUP_RATES, "total_num_steps": _STEPS},
    "WarmupCosineLR": {**_WARMUP, "total_num_steps": _STEPS, "warmup_min_ratio": _FRACTION, "cos_min_ratio": _FRACTION},
    "OneCycle": {
        "cycle_min_lr": _FROM_0, "cycle_max_lr": _FROM_0, "decay_lr_rate": _FROM_0,
        "cycle_first_step_size": Key("int", low=1), "cycle_second_step_size": Key("int", low=1, null=True),
        "cycle_first_stair_count": Key("int", low=0), "cycle_second_stair_count": Key("int", low=0, null=True),
        "decay_step_size": Key("int", low=0), "cycle_momentum": _BOOL, "cycle_min_mom": _FRACTION,
        "cycle_max_mom": _FRACTION, "decay_mom_rate": _FROM_0, "last_batch_iteration": _RESUME_STEP,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _FROM_0, "lr_range_test_step_size": Key("int", low=1),
        "lr_range_test_step_rate": _FROM_0, "lr_range_test_staircase": _BOOL, "last_batch_iteration": _RESUME_STEP,
    },
}
REQUIRED_SCHEDULER_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
