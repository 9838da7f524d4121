"""Rules for optimizers and schedulers."""

from importlib.util import find_spec

from pretrain.config.ds_json.optimizers import CPU_OPTIMIZERS, OPTIMIZERS, REQUIRED_SCHEDULER_PARAMS, ZERO_OPTIMIZERS
from pretrain.config.resolve import ResolvedConfig

_ZERO = "zero_optimization"
_OFFLOAD_DEVICE = f"{_ZERO}.offload_optimizer.device"
# DeepSpeed's GPU optimizers take these parameters, its CPU optimizers do not.
_GPU_ONLY_PARAMS = ("set_grad_none", "lr_decay", "initial_accumulator_value")
_TORCH_ADAM_PARAMS = ("lr", "betas", "eps", "weight_decay", "foreach", "fused", "torch_adam", "adam_w_mode")


def optimizer_of_device(run: ResolvedConfig) -> None:
    layout, kind = run.layout, run.get("optimizer.type")
    if layout.offload_optimizer != "none" and layout.optimizer not in CPU_OPTIMIZERS:
        raise run.error("optimizer.type", expected="Adam, AdamW, Lion, Muon or Adagrad, which run on the CPU",
                        remedy="or remove zero_optimization.offload_optimizer")
    if layout.optimizer == "adagrad" and layout.zero_stage > 0 and layout.offload_optimizer == "none":
        raise run.error("optimizer.type", expected=f'{_OFFLOAD_DEVICE} "cpu" for Adagrad with ZeRO',
                        remedy="otherwise DeepSpeed rebuilds the optimizer without its parameter groups; or use AdamW")
    untested = layout.zero_stage > 0 and layout.optimizer not in ZERO_OPTIMIZERS
    if untested and not run.get("zero_allow_untested_optimizer"):
        raise run.error("optimizer.type", problem=f"{kind} with ZeRO computes norms of parts of the matrices, so that "
                        "its updates depend on the layout",
                        remedy='use AdamW, or accept it: "zero_allow_untested_optimizer": true')
    if layout.optimizer in ("lion", "lamb") and run.device.kind == "cpu" and layout.offload_optimizer == "none":
        offload = f' or offload it: {_OFFLOAD_DEVICE} "cpu"' if layout.optimizer == "lion" else ""
        raise run.error("optimizer.type", expected="an optimizer that runs on this CPU device",
                        remedy=f"use AdamW{offload}")
    if layout.optimizer == "lamb" and layout.precision == "fp16" and run.get("fp16.loss_scale"):
        raise run.error("optimizer.type", expected="dynamic loss scaling (fp16.loss_scale 0) for Lamb")


def eight_bit(run: ResolvedConfig) -> None:
    """AdamW8bit needs CUDA and a package, and has no states in host memory."""
    if run.layout.optimizer != "adamw8bit":
        return
    if run.device.kind != "cuda":
        raise run.error("optimizer.type", expected="AdamW on this device: 8-bit states need CUDA")
    if find_spec("bitsandbytes") is None:
        raise run.error("optimizer.type", problem="AdamW8bit needs the package bitsandbytes, which is not installed",
                        remedy="pip install bitsandbytes, or use AdamW")


def muon(run: ResolvedConfig) -> None:
    layout = run.layout
    if layout.optimizer != "muon":
        return
    if layout.zero_stage == 0 or layout.uses_bf16_optimizer:
        raise run.error("optimizer.type", expected="ZeRO stage 1 to 3, without fp32 accumulation at stage 1, for Muon")
    if layout.offload_optimizer == "nvme":
        raise run.error(_OFFLOAD_DEVICE, expected='"cpu" or "none" for Muon')
    if layout.zero_stage == 3 and layout.reduce_scatter:
        raise run.error(f"{_ZERO}.reduce_scatter", found="true", expected="false for Muon at ZeRO stage 3",
                        remedy="Muon needs complete gradients on each rank")


def muon_learning_rates(run: ResolvedConfig) -> None:
    """Reject two learning rates with a scheduler of the JSON, which would set one rate for all parameters."""
    rates = [name for name in ("muon_lr", "adam_lr") if run.get(f"optimizer.params.{name}") is not None]
    if rates and run.schedule is None:
        raise run.error(f"optimizer.params.{rates[0]}", problem='the "scheduler" sets one learning rate for all '
                        "parameters", remedy='remove the "scheduler" block, and use --lr_schedule')


def optimizer_params(run: ResolvedConfig) -> None:
    """Reject parameters that are ignored or not accepted by the optimizer class that DeepSpeed selects."""
    params, optimizer = run.get("optimizer.params", {}), run.layout.optimizer
    if optimizer not in OPTIMIZERS:
        return
    offloaded, torch_adam = run.layout.offload_optimizer != "none", params.get("torch_adam")
    for name in params:
        key = f"optimizer.params.{name}"
        if name == "adam_w_mode" and optimizer == "adamw" and params[name] is False:
            raise run.error(key, expected="true with AdamW",
                            remedy='use "type": "Adam" for weight decay inside the gradient')
        if torch_adam and optimizer != "muon" and name not in _TORCH_ADAM_PARAMS:
            raise run.error(key, problem='torch.optim.AdamW, which "torch_adam": true selects, does not take it',
                            remedy="remove it")
        if name in ("foreach", "fused") and not torch_adam:
            raise run.error(key, problem='it needs "torch_adam": true', remedy="remove it")
        if name == "fp32_optimizer_states" and not offloaded:
            raise run.error(key, problem="it has no effect without offload_optimizer", remedy="remove it")
        if name in _GPU_ONLY_PARAMS and offloaded:
            raise run.error(key, problem="DeepSpeed's CPU optimizers do not take it", remedy="remove it")
    if run.get("optimizer.legacy_fusion"):
        raise run.error("optimizer.legacy_fusion", expected="false",
                        remedy="it is for checkpoints of old versions; remove it")


def torch_optimizer_params(run: ResolvedConfig) -> None:
    """Reject values that torch.optim's constructors and steps reject."""
    params = run.get("optimizer.params", {})
    if params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        raise run.error("optimizer.params.nesterov", expected="false without momentum, or with dampening")
    low, high = params.get("etas", (0.5, 1.2))
    if not low < 1 < high:
        raise run.error("optimizer.params.etas", expected="one value below 1 and one above 1")
    if params.get("foreach") and params.get("fused"):
        raise run.error("optimizer.params.fused", problem="foreach and fused exclude each other",
                        remedy="remove one of them")
    if params.get("capturable") and run.device.kind == "cpu":
        raise run.error("optimizer.params.capturable", expected="false on a CPU")


def scheduler_params(run: ResolvedConfig) -> None:
    kind = run.get("scheduler.type")
    if kind is None:
        return
    for name in REQUIRED_SCHEDULER_PARAMS.get(kind, ()):
        if run.get(f"scheduler.params.{name}") is None:
            raise run.error(f"scheduler.params.{name}", problem=f"the value is missing, and {kind} needs it")
    lowest, highest = (run.get(f"scheduler.params.cycle_{end}_lr", 0) for end in ("min", "max"))
    if lowest > highest:
        raise run.error("scheduler.params.cycle_min_lr", expected=f"at most cycle_max_lr, {highest}")
    total, warmup = run.get("scheduler.params.total_num_steps"), run.get("scheduler.params.warmup_num_steps", 0)
    if total is not None and warmup >= total:
        raise run.error("scheduler.params.warmup_num_steps", expected=f"less than total_num_steps, {total}")
