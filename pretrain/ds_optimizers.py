"""Parameters that each optimizer and scheduler of a DeepSpeed 0.19.8 JSON takes, without importing deepspeed."""

from pretrain.ds_schema import Key, Tree

_RATE = Key("number", low=0, auto=True)
_SHARE = Key("number", low=0, high=1)
_SMALL = Key("number", low=0, auto=True)
_DECAY = Key("number", low=0, auto=True)
_BETAS = Key("pair", low=0, high=1, auto=True)
_ON = Key("bool")
_NO_CLIPPING = Key(refused='DeepSpeed refuses it; use "gradient_clipping" at the top level')
_NO_AMSGRAD = Key(refused="DeepSpeed's optimizers do not have it; remove the key")

_ADAM: Tree = {
    "lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _ON, "amsgrad": _NO_AMSGRAD,
    "adam_w_mode": _ON, "torch_adam": _ON, "fp32_optimizer_states": _ON, "set_grad_none": _ON,
    "foreach": Key("bool", null=True), "max_grad_norm": _NO_CLIPPING,
}
# By the lower-case name, as DeepSpeed compares its own optimizers' names.
OPTIMIZERS: dict[str, Tree] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {"lr": _RATE, "betas": _BETAS, "weight_decay": _DECAY, "set_grad_none": _ON, "fp32_optimizer_states": _ON,
             "max_grad_norm": _NO_CLIPPING},
    "adagrad": {"lr": _RATE, "eps": _SMALL, "weight_decay": _DECAY, "amsgrad": _NO_AMSGRAD,
                "lr_decay": Key("number", low=0), "initial_accumulator_value": Key("number", low=0),
                "fp32_optimizer_states": _ON, "max_grad_norm": _NO_CLIPPING},
    "lamb": {"lr": _RATE, "betas": _BETAS, "eps": _SMALL, "weight_decay": _DECAY, "bias_correction": _ON,
             "eps_inside_sqrt": _ON, "max_coeff": Key("number", low=0), "min_coeff": Key("number", low=0),
             "amsgrad": _NO_AMSGRAD, "max_grad_norm": _NO_CLIPPING},
    "muon": {"lr": _RATE, "momentum": _SHARE, "weight_decay": _DECAY,
             "ns_method": Key("str", words=("gram", "standard")),
             "muon_lr": Key("number", low=0), "adam_lr": Key("number", low=0), "betas": _BETAS, "eps": _SMALL,
             "adam_w_mode": _ON, "torch_adam": _ON, "fp32_optimizer_states": _ON, "max_grad_norm": _NO_CLIPPING,
             "per_head_muon": Key(refused="the models here do not name their attention heads to Muon; remove the key")},
}
# torch.optim's own, taken by their exact names with free parameters.
TORCH_OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TORCH_PARAMS: Tree = {"lr": _RATE, "weight_decay": _DECAY, "max_grad_norm": _NO_CLIPPING}
TORCH_REFUSED = {
    "LBFGS": "it needs the loss computed several times a step",
    "SparseAdam": "the models have no sparse gradients",
}
DEEPSPEED_REFUSED = {
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
# Those with an implementation for offload_optimizer (Muon: its matrices' update, beside CPU Adam).
CPU_OPTIMIZERS = ("adam", "adamw", "lion", "adagrad")
# Those that ZeRO knows; the others need "zero_allow_untested_optimizer".
ZERO_OPTIMIZERS = ("adam", "adamw", "lion", "adagrad", "muon")

_STEPS = Key("int", low=1, auto=True)
_NUMBER = Key("number")
_WARMUP: Tree = {"warmup_num_steps": _STEPS, "warmup_type": Key("str", words=("log", "linear"))}
_WARMUP_RATES: Tree = {"warmup_min_lr": _RATE, "warmup_max_lr": _RATE}
SCHEDULERS: dict[str, Tree] = {
    "WarmupLR": {**_WARMUP, **_WARMUP_RATES},
    "WarmupDecayLR": {**_WARMUP, **_WARMUP_RATES, "total_num_steps": _STEPS},
    "WarmupCosineLR": {**_WARMUP, "total_num_steps": _STEPS, "warmup_min_ratio": _SHARE, "cos_min_ratio": _SHARE},
    "OneCycle": {
        "cycle_min_lr": _NUMBER, "cycle_max_lr": _NUMBER, "decay_lr_rate": _NUMBER,
        "cycle_first_step_size": Key("int", low=1), "cycle_second_step_size": Key("int", low=1, null=True),
        "cycle_first_stair_count": Key("int", low=0), "cycle_second_stair_count": Key("int", low=0, null=True),
        "decay_step_size": Key("int", low=0), "cycle_momentum": _ON, "cycle_min_mom": _NUMBER,
        "cycle_max_mom": _NUMBER, "decay_mom_rate": _NUMBER,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _NUMBER, "lr_range_test_step_size": Key("int", low=1),
        "lr_range_test_step_rate": _NUMBER, "lr_range_test_staircase": _ON,
    },
}
REQUIRED_SCHEDULER_PARAMS = {
    "WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
