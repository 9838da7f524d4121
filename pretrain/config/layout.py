"""How a run is laid out over ranks and memories: everything but the model that an estimate depends on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pretrain.config.ds_json.keys import check_keys
from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.ds_json.schema import DEFAULT_PARTITION_METHOD, DEFAULT_REDUCE_BUCKET_SIZE, PARTITION_METHODS, TREE
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.config.validate import Plan

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "radam": 2, "lamb": 2, "adamax": 2, "adadelta": 2, "lion": 1,
           "adagrad": 1, "muon": 1, "rmsprop": 1, "sgd": 0}  # tensors of a parameter's size that it keeps
_SIZE_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
              "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size")
_PARALLEL_KEYS = ("tensor_parallel", "sequence_parallel_size")


@dataclass(frozen=True)
class Layout:
    """One way to run a model. Sizes named *_size and *_parameters are elements unless they say bytes or ranks."""

    name: str = ""
    world_size: int = 1  # ranks
    zero_stage: int = 0
    pipeline_stages: int = 1
    partition_method: str = DEFAULT_PARTITION_METHOD
    tensor_parallel_size: int = 1  # ranks that share each matrix
    sequence_parallel_size: int = 1  # ranks that share each sequence (Ulysses)
    expert_parallel_size: int = 1  # ranks that share the experts
    precision: str = "bf16"  # fp32, bf16, fp16
    grad_accum_dtype: str | None = None  # None: as `precision`
    optimizer: str = "adamw"  # lower case
    optimizer_moments: int = 2  # tensors of a parameter's size that the optimizer keeps
    torch_optimizer: bool = False  # torch.optim's own, not one of DeepSpeed's kernels, which need no working memory
    masters_in_16bit: bool = False  # bf16_master_weights_and_grads, fp16_master_weights_and_grads
    moments_in_16bit: bool = False  # bf16_optimizer_states, or fp32_optimizer_states: false
    offload_optimizer: str = "none"  # none, cpu, nvme
    offload_optimizer_pinned: bool = True
    offload_optimizer_ratio: float = 1.0
    offload_optimizer_buffer_count: int = 4
    offload_pipeline_read: bool = False
    offload_pipeline_write: bool = False
    offload_param: str = "none"  # none, cpu, nvme
    offload_param_pinned: bool = True
    offload_param_buffer_count: int = 5
    offload_param_buffer_size: int = 100_000_000
    offload_param_max_in_cpu: int = 1_000_000_000
    reduce_bucket_size: int = DEFAULT_REDUCE_BUCKET_SIZE
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 2**63 - 1
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    aio_block_bytes: int = 1_048_576  # smaller tensors than this (or 1 MiB) are not written to NVMe
    aio_intra_op_parallelism: int = 1
    hpz_partition_size: int = 1  # ranks of ZeRO++'s second copy of the parameters
    activation_checkpoint_interval: int = 0  # layers of the pipeline's list in a recomputed group; 0: none
    micro_batch_size: int = 1  # samples
    gradient_accumulation_steps: int = 1
    seq_length: int = 1024  # tokens
    device_kind: str = "cuda"  # cpu, cuda
    notes: tuple[str, ...] = field(default=(), compare=False)  # what was not understood, or would be refused here

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different samples."""
        return self.world_size // (self.pipeline_stages * self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def zero_size(self) -> int:
        """Ranks over which ZeRO divides: data-parallel ones, and those that share a sequence."""
        return self.data_parallel_size * self.sequence_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def element_bytes(self) -> int:
        """Of a parameter as the model computes with it."""
        return DTYPE_BYTES[self.precision]

    @property
    def grad_accum_bytes(self) -> int:
        """Of an accumulated gradient."""
        return DTYPE_BYTES[self.grad_accum_dtype or self.precision]

    @property
    def reused_parameters(self) -> int:
        """Elements that stage 3's backward finds still gathered, at most. Prefetching runs ahead into the backward, at
        least a parameter with each submodule, and what it meets there stays, up to max_live_parameters. With or without
        it what comes again within max_reuse_distance stays: between lie the layers that follow, once in the forward and
        once (recomputed: twice) in the backward.
        (runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, __params_to_release)
        """
        by_distance = self.max_reuse_distance // (3 if self.activation_checkpoint_interval else 2)
        return max(by_distance, self.max_live_parameters if self.prefetch_bucket_size else 0)

    @property
    def uses_pipeline_module(self) -> bool:
        """As this project builds it: ZeRO-2 and 3 need the plain module."""
        return self.zero_stage < 2

    def check(self) -> "Layout":
        """Itself. Raises ConfigError for degrees that do not divide the ranks, or words that are none."""
        for name in ("world_size", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
                     "expert_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "seq_length"):
            if getattr(self, name) < 1:
                raise ConfigError(name, found=getattr(self, name), expected="at least 1")
        shared = self.pipeline_stages * self.tensor_parallel_size * self.sequence_parallel_size
        if self.world_size % shared:
            raise ConfigError("world_size", found=f"{self.world_size} ranks", expected=f"a multiple of {shared}: "
                              "pipeline stages x tensor-parallel x sequence-parallel ranks")
        if self.zero_size % self.expert_parallel_size:
            raise ConfigError("expert_parallel_size", found=self.expert_parallel_size,
                              expected=f"a divisor of the {self.zero_size} data-parallel ranks")
        for name, words in (("precision", tuple(DTYPE_BYTES)), ("zero_stage", (0, 1, 2, 3)),
                            ("offload_optimizer", ("none", "cpu", "nvme")),
                            ("offload_param", ("none", "cpu", "nvme")), ("device_kind", ("cpu", "cuda"))):
            if getattr(self, name) not in words:
                raise ConfigError(name, found=repr(getattr(self, name)), expected=f"one of {words}")
        return self


def layout_of_plan(plan: "Plan", *, device_kind: str, name: str = "") -> Layout:
    """The layout of a run that `check_run` judged."""
    return layout_of_config(plan.ds_config, world_size=plan.world_size, seq_length=plan.args.seq_length,
                            hidden_size=plan.model.hidden_size, device_kind=device_kind, name=name)


def layout_of_config(config: Mapping[str, Any], *, world_size: int, seq_length: int = 1024,
                     hidden_size: int | None = None, micro_batch_size: int | None = None,
                     gradient_accumulation_steps: int | None = None, num_parameters: int | None = None,
                     device_kind: str = "cuda", name: str = "") -> Layout:
    """The layout that a DeepSpeed JSON describes, whoever wrote it.

    Lenient: "auto" values are filled (batch sizes from the arguments, ZeRO's sizes from `hidden_size`, as transformers
    documents them; a reduce bucket never holds more than `num_parameters`). `notes` says which keys were not
    understood, and what this project's check of keys would refuse first; "not understood" are those that no DeepSpeed
    0.19.8 has.

    Raises:
        ConfigError: degrees that do not divide the ranks, values that are no layout.
    """
    get = _Getter(config)
    notes = [f'"{key}" is not understood, and has no part in the estimate' for key in config
             if key not in TREE and key not in _PARALLEL_KEYS]
    try:
        check_keys(DsFile(name or "this JSON", dict(config)))
    except ConfigError as error:
        notes.append(f"this project would refuse it: {error}")
    tensor = get.integer("tensor_parallel.autotp_size", get.integer("tensor_parallel.tp_size", 1))
    layout = Layout(
        name=name, world_size=world_size, seq_length=seq_length, device_kind=device_kind,
        tensor_parallel_size=max(1, tensor), sequence_parallel_size=get.integer("sequence_parallel_size", 1),
        **_zero(get, hidden_size, notes), **_precision(get), **_optimizer(get), **_offload(get),
        **_pipeline(get, notes))
    layout = replace(layout, **_batch(get, layout, micro_batch_size, gradient_accumulation_steps))
    if layout.zero_stage < 2:
        layout = replace(layout, overlap_comm=False)  # as DeepSpeed does for a PipelineModule
    if layout.zero_stage < 3:
        layout = replace(layout, offload_param="none")  # DeepSpeed does not read it
    if num_parameters is not None:
        layout = replace(layout, reduce_bucket_size=min(layout.reduce_bucket_size, num_parameters))
    return replace(layout, notes=tuple(notes)).check()


class _Getter:
    """Dotted keys of a JSON in which "auto" and null count as not given."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __call__(self, dotted: str, default: Any = None) -> Any:
        value = get_value(self.config, dotted)
        return default if value is None or value == "auto" else value

    def integer(self, dotted: str, default: int) -> int:
        value = self(dotted, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(dotted, found=repr(value), expected="a number")
        return int(value)


def _zero(get: _Getter, hidden_size: int | None, notes: list[str]) -> dict[str, Any]:
    """The zero_optimization block; "auto" sizes as transformers' HfDeepSpeedConfig fills them."""
    stage = get.integer("zero_optimization.stage", 0)
    result: dict[str, Any] = {"zero_stage": stage}
    auto = {} if hidden_size is None else {
        "reduce_bucket_size": hidden_size**2, "prefetch_bucket_size": int(0.9 * hidden_size**2),
        "param_persistence_threshold": 10 * hidden_size}
    for key in _SIZE_KEYS:
        for name in (f"zero_optimization.{key}", f"zero_optimization.stage3_{key}"):
            value = get_value(get.config, name)
            if value == "auto" and key in auto:
                result[key] = auto[key]
            elif value == "auto":
                notes.append(f'{name}: "auto" taken as DeepSpeed\'s default')
            elif value is not None:
                result[key] = get.integer(name, 0)
    overlap = get("zero_optimization.overlap_comm")
    result["overlap_comm"] = stage == 3 if overlap is None else bool(overlap)
    for key, default in (("contiguous_gradients", True), ("reduce_scatter", True), ("round_robin_gradients", False),
                         ("parameter_alignment", False)):
        result[key] = bool(get(f"zero_optimization.{key}", default))
    result["hpz_partition_size"] = max(1, get.integer("zero_optimization.zero_hpz_partition_size", 1))
    return result


def _precision(get: _Getter) -> dict[str, Any]:
    bf16 = "bf16" if "bf16" in get.config else "bfloat16"
    states = {"bf16": get_value(get.config, f"{bf16}.enabled"), "fp16": get_value(get.config, "fp16.enabled")}
    auto = "bf16" if states["bf16"] == "auto" else "fp16" if states["fp16"] == "auto" else "fp32"
    precision = next((name for name, state in states.items() if state is True), auto)
    block = bf16 if precision == "bf16" else precision
    moments = get("bf16.bf16_optimizer_states", False) or not get("optimizer.params.fp32_optimizer_states", True)
    return {"precision": precision, "grad_accum_dtype": get("data_types.grad_accum_dtype"),
            "masters_in_16bit": bool(get(f"{block}.{precision}_master_weights_and_grads", False)),
            "moments_in_16bit": bool(moments)}


def _optimizer(get: _Getter) -> dict[str, Any]:
    kind = str(get("optimizer.type", "AdamW")).lower()
    moments = MOMENTS.get(kind, 2)
    if kind == "sgd":
        moments = 1 if get("optimizer.params.momentum", 0) else 0
    own = kind not in ("adam", "adamw", "lion", "lamb", "adagrad", "muon")
    return {"optimizer": kind, "optimizer_moments": moments,
            "torch_optimizer": own or bool(get("optimizer.params.torch_adam", False))}


def _offload(get: _Getter) -> dict[str, Any]:
    """The two offload blocks, and their older spelling."""
    result: dict[str, Any] = {}
    for what in ("optimizer", "param"):
        prefix = f"zero_optimization.offload_{what}"
        old = get("zero_optimization.cpu_offload" + ("_param" if what == "param" else ""), False)
        result[f"offload_{what}"] = str(get(f"{prefix}.device", "cpu" if old else "none")).lower()
        result[f"offload_{what}_pinned"] = bool(get(f"{prefix}.pin_memory", True))
        result[f"offload_{what}_buffer_count"] = get.integer(f"{prefix}.buffer_count", 5 if what == "param" else 4)
    result["offload_optimizer_ratio"] = float(get("zero_optimization.offload_optimizer.ratio", 1.0))
    for name in ("pipeline_read", "pipeline_write"):
        result[f"offload_{name}"] = bool(get(f"zero_optimization.offload_optimizer.{name}", False))
    result["aio_block_bytes"] = get.integer("aio.block_size", 1_048_576)
    result["aio_intra_op_parallelism"] = get.integer("aio.intra_op_parallelism", 1)
    result["offload_param_buffer_size"] = get.integer("zero_optimization.offload_param.buffer_size", 100_000_000)
    result["offload_param_max_in_cpu"] = get.integer("zero_optimization.offload_param.max_in_cpu", 1_000_000_000)
    return result


def _pipeline(get: _Getter, notes: list[str]) -> dict[str, Any]:
    if get("activation_checkpointing") and not get("pipeline.activation_checkpoint_interval"):
        notes.append('"activation_checkpointing" says how, not whether, layers are recomputed; '
                     '"pipeline": {"activation_checkpoint_interval": 1} recomputes every block')
    method = str(get("pipeline.partition_method", get("pipeline.partition", DEFAULT_PARTITION_METHOD)))
    return {"pipeline_stages": get.integer("pipeline.stages", 1),
            "partition_method": PARTITION_METHODS.get(method.lower(), method),
            "activation_checkpoint_interval": get.integer("pipeline.activation_checkpoint_interval", 0)}


def _batch(get: _Getter, layout: Layout, micro: int | None, steps: int | None) -> dict[str, Any]:
    """Micro-batch and accumulation, the one that is not given from train_batch_size as DeepSpeed does it."""
    micro = get("train_micro_batch_size_per_gpu", micro)
    steps = get("gradient_accumulation_steps", steps)
    total, ranks = get("train_batch_size"), layout.data_parallel_size
    if micro is None:
        micro = max(1, int(total) // ((steps or 1) * ranks)) if total else 1
    if steps is None:
        steps = max(1, int(total) // (micro * ranks)) if total else 1
    return {"micro_batch_size": int(micro), "gradient_accumulation_steps": int(steps)}


LAYOUT_FIELDS = tuple(item.name for item in fields(Layout))
