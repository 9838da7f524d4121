"""Parameters of each optimizer and scheduler of a DeepSpeed 0.19.8 JSON, without importing deepspeed."""

from pretrain.config.ds_json.schema import Key, Tree

_RATE = Key("number", low=0, auto=True)
_FRACTION = Key("number", low=0, high=1)
_SMALL = Key("number", low=0, auto=True)
_DECAY = Key("number", low=0, auto=True)
_BETAS = Key("pair", low=0, high=0.999999, auto=True)
_BOOL = Key("bool")
_NO_CLIPPING = Key(rejected='DeepSpeed rejects it; use "gradient_clipping" at the top level')
_NO_AMSGRAD = Key(rejected="DeepSpeed's optimizers do not have it; remove the key")

_ADAM: Tree = {
    "lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _BOOL,
    "amsgrad": _NO_AMSGRAD, "adam_w_mode": _BOOL, "torch_adam": _BOOL, "fp32_optimizer_states": _BOOL,
    "set_grad_none": _BOOL, "foreach": Key("bool", null=True), "fused": Key("bool", null=True),
    "max_grad_norm": _NO_CLIPPING,
}
# By the lower-case name: DeepSpeed compares the names of its own optimizers in lower case.
OPTIMIZERS: dict[str, Tree] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    # of the package bitsandbytes: engine/eight_bit.py
    "adamw8bit": {"lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "max_grad_norm": _NO_CLIPPING},
    "lion": {"lr": _RATE, "betas": _BETAS, "weight_decay": _DECAY, "set_grad_none": _BOOL,
             "fp32_optimizer_states": _BOOL, "max_grad_norm": _NO_CLIPPING},
    "adagrad": {"lr": _RATE, "eps": _SMALL, "weight_decay": _DECAY, "amsgrad": _NO_AMSGRAD,
                "lr_decay": Key("number", low=0), "initial_accumulator_value": Key("number", low=0),
                "fp32_optimizer_states": _BOOL, "max_grad_norm": _NO_CLIPPING},
    "lamb": {"lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _BOOL,
             "eps_inside_sqrt": _BOOL, "max_coeff": Key("number", low=0), "min_coeff": Key("number", low=0),
             "amsgrad": _NO_AMSGRAD, "max_grad_norm": _NO_CLIPPING},
    "muon": {"lr": _RATE, "momentum": _FRACTION, "weight_decay": _DECAY,
             "ns_method": Key("str", choices=("gram", "standard")),
             "muon_lr": Key("number", low=0), "adam_lr": Key("number", low=0), "betas": _BETAS, "eps": _SMALL,
             "adam_w_mode": _BOOL, "torch_adam": _BOOL, "fp32_optimizer_states": _BOOL, "max_grad_norm": _NO_CLIPPING,
             "per_head_muon": Key(rejected="the models here have no marked attention heads; remove the key")},
}
# torch.optim's optimizers by their exact names: parameters besides "lr" and the implementation flags below.
_FROM_0 = Key("number", low=0)
_TORCH: dict[str, Tree] = {
    "ASGD": {"lambd": _FROM_0, "alpha": _FROM_0, "t0": _FROM_0, "weight_decay": _DECAY},
    "Adadelta": {"rho": _FRACTION, "eps": _SMALL, "weight_decay": _DECAY},
    "Adafactor": {"beta2_decay": Key("number", high=0), "eps": Key("pair", low=0), "d": Key("number", low=1),
                  "weight_decay": _DECAY},
    "Adamax": {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY},
    "NAdam": {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "momentum_decay": _FROM_0,
              "decoupled_weight_decay": _BOOL},
    "RAdam": {"betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "decoupled_weight_decay": _BOOL},
    "RMSprop": {"alpha": _FROM_0, "eps": _SMALL, "weight_decay": _DECAY, "momentum": _FRACTION, "centered": _BOOL},
    "Rprop": {"etas": Key("pair", low=1e-9), "step_sizes": Key("pair", low=0)},
    "SGD": {"momentum": _FRACTION, "dampening": Key("number"), "weight_decay": _DECAY, "nesterov": _BOOL,
            "fused": _BOOL},
}
_TORCH_COMMON: Tree = {"lr": _RATE, "foreach": Key("bool", null=True),
                       "maximize": Key(rejected="the loss is minimized")}
_TORCH_GRAPHS: Tree = {"capturable": _BOOL, "differentiable": Key(rejected="nothing differentiates through a step")}
TORCH_OPTIMIZERS: dict[str, Tree] = {
    name: {**_TORCH_COMMON, **tree, "max_grad_norm": _NO_CLIPPING, **({} if name == "Adafactor" else _TORCH_GRAPHS)}
    for name, tree in _TORCH.items()
}
del TORCH_OPTIMIZERS["SGD"]["capturable"]
TORCH_REJECTED = {
    "LBFGS": "it needs the loss computed several times a step",
    "SparseAdam": "the models have no sparse gradients",
}
DEEPSPEED_REJECTED = {
    "onebitadam": "DeepSpeed 0.19.8 has no 1-bit optimizers",
    "zerooneadam": "DeepSpeed 0.19.8 has no 1-bit optimizers",
    "onebitlamb": "DeepSpeed 0.19.8 has no 1-bit optimizers",
    "muadam": "maximal-update scaling is not supported by this version",
    "muadamw": "maximal-update scaling is not supported by this version",
    "musgd": "maximal-update scaling is not supported by this version",
    "fusedadam": 'type "AdamW" is DeepSpeed\'s FusedAdam unless the optimizer is offloaded',
    "cpuadam": 'write type "AdamW" and "zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    "deepspeedcpuadam": 'write type "AdamW" and "zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
}
KNOWN_NAMES = ("Adam", "AdamW", "AdamW8bit", "Lion", "Muon", "Lamb", "Adagrad", *TORCH_OPTIMIZERS)


def optimizer_params(kind: str) -> Tree | None:
    """Return the parameters of an "optimizer.type"; None if there is no such optimizer."""
    return OPTIMIZERS.get(kind.lower()) or TORCH_OPTIMIZERS.get(kind)


# Optimizers with a CPU implementation, which offload_optimizer needs.
CPU_OPTIMIZERS = ("adam", "adamw", "lion", "adagrad", "muon")
# Optimizers that DeepSpeed tests with ZeRO.
ZERO_OPTIMIZERS = ("adam", "adamw", "lion", "adagrad", "muon")
# Optimizers of torch and bitsandbytes that update each weight from its own gradient and states alone. ZeRO gives an
# optimizer flat parts of the parameters, which changes nothing for these (but for the blocks of 8-bit states);
# tests/engine/test_optimizers.py compares those of torch in all layouts.
ELEMENTWISE_OTHERS = ("sgd", "rmsprop", "adamax", "nadam", "radam", "adadelta", "asgd", "rprop", "adamw8bit")

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
