"""`Layout`: parallelism, ZeRO, precision, offload and batch sizes of a run, and its parsing from a DeepSpeed JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.ds_json.read import get_value
from pretrain.config.ds_json.schema import DEFAULT_PARTITION_METHOD, DEFAULT_REDUCE_BUCKET_SIZE, PARTITION_METHODS
from pretrain.errors import ConfigError
from pretrain.model.recompute import Recompute

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SIZE_KEYS = ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
             "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "sub_group_size")


@dataclass(frozen=True)
class Layout:
    """Parallel degrees, ZeRO stage, precision, offload, batch sizes and buffer sizes of a run.

    The layout and the model together determine a run's memory, speed and checkpoint files. Buffer sizes, thresholds and
    *_parameters count elements.
    """

    name: str = ""
    world_size: int = 1  # ranks
    zero_stage: int = 0
    pipeline_stages: int = 1
    partition_method: str = DEFAULT_PARTITION_METHOD
    layer_times: tuple[int, ...] = ()  # for the method "time": ns of each layer, measured or predicted
    tensor_parallel_size: int = 1  # ranks that share each matrix
    sequence_parallel_size: int = 1  # ranks that share each sequence (Ulysses)
    expert_parallel_size: int = 1  # ranks that share the experts
    precision: str = "bf16"  # fp32, bf16, fp16
    grad_accum_dtype: str | None = None  # None: the same as `precision`
    optimizer: str = "adamw"  # lower case
    optimizer_moments: int = 2  # optimizer-state tensors of a parameter's size
    torch_optimizer: bool = False  # True: a class of torch.optim, not fused, which needs temporary memory
    masters_in_16bit: bool = False  # master weights: bf16_master_weights_and_grads, fp16_master_weights_and_grads
    moments_in_16bit: bool = False  # optimizer states: bf16_optimizer_states, or fp32_optimizer_states: false
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
    aio_block_bytes: int = 1_048_576  # tensors below this size, or below 1 MiB, stay in host memory
    aio_intra_op_parallelism: int = 1
    hpz_partition_size: int = 1  # ranks that share ZeRO++'s secondary copy of the parameters
    activation_checkpoint_interval: int = 0  # layers recomputed together; 0: see `recompute`
    recompute: str = "none"  # part of each block that is recomputed: none, blocks, attention, mlp
    recompute_every: int = 1  # the part is recomputed in every N-th block
    offload_activations: bool = False  # the inputs of recomputed blocks are kept in host memory
    mlp_tiles: int = 1  # pieces of the sequences in which each MLP is computed, and recomputed
    model_extensions: tuple[str, ...] = ()  # that change its operators: see Extension.model
    plain_operators: bool = False  # torch's operators take the place of the custom kernels
    compile_blocks: bool = False  # one graph of torch's compiler for each block
    micro_batch_size: int = 1  # samples
    gradient_accumulation_steps: int = 1
    seq_length: int = 1024  # tokens
    document_attention: bool = False
    device_kind: str = "cuda"  # cpu, cuda
    notes: tuple[str, ...] = field(default=(), compare=False)  # remarks about predicted values

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that process different samples."""
        return self.world_size // (self.pipeline_stages * self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def zero_size(self) -> int:
        """Number of ranks over which ZeRO partitions: data-parallel times sequence-parallel ranks."""
        return self.data_parallel_size * self.sequence_parallel_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.world_size // self.pipeline_stages

    @property
    def expert_zero_size(self) -> int:
        """Number of ranks over which ZeRO partitions an expert: those that hold the same experts.

        Without expert parallelism, these are the ranks that hold the same part of any other parameter.
        """
        return self.zero_size if self.expert_parallel_size == 1 else self.stage_size // self.expert_parallel_size

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self.micro_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter in the precision of the forward and backward pass."""
        return DTYPE_BYTES[self.precision]

    @property
    def grad_accum_bytes(self) -> int:
        """Bytes of an element of an accumulated gradient."""
        return DTYPE_BYTES[self.grad_accum_dtype or self.precision]

    def checkpoint_bytes(self, num_parameters: int) -> int:
        """Bytes of a checkpoint's tensors: master weights, optimizer states and, except with ZeRO-3, the weights.

        fp32 at ZeRO stage 0 has no separate master weights. File headers and padding are not counted.
        """
        no_masters = self.precision == "fp32" and self.zero_stage == 0
        master_bytes = 0 if no_masters else 2 if self.masters_in_16bit else 4
        state_bytes = (2 if self.moments_in_16bit else 4) * self.optimizer_moments
        return num_parameters * (master_bytes + state_bytes + (0 if self.zero_stage == 3 else self.element_bytes))

    @property
    def recomputation(self) -> Recompute:
        """Settings of recomputation in the backward pass. Only complete blocks can have their inputs in host memory."""
        complete = self.activation_checkpoint_interval > 0 or self.recompute == "blocks"
        return Recompute(self.recompute, self.recompute_every, self.activation_checkpoint_interval,
                         offload=self.offload_activations and complete, mlp_tiles=self.mlp_tiles)

    @property
    def reused_parameters(self) -> int:
        """Largest number of gathered elements that ZeRO-3's backward pass can use without gathering them again.

        Prefetching in the forward pass already gathers parameters for the backward pass, at least one per submodule.
        They stay gathered, up to max_live_parameters. In addition, a parameter is not released if its next use is
        within max_reuse_distance elements. All following layers lie between the two uses: once in the forward pass and
        once in the backward pass, or twice there with recomputation.
        (DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, __params_to_release)
        """
        by_distance = self.max_reuse_distance // (3 if self.recomputation.is_on else 2)
        return max(by_distance, self.max_live_parameters if self.prefetch_bucket_size else 0)

    @property
    def uses_pipeline_module(self) -> bool:
        """True below ZeRO stage 2: DeepSpeed's PipelineModule supports stages 0 and 1 only.

        Its engine does not support sequence parallelism (0.19.8: it ignores it). With expert parallelism, the plain
        module is used where it can be: it needs no pipeline of one stage.
        """
        return self.zero_stage < 2 and self.sequence_parallel_size == 1 and \
            (self.expert_parallel_size == 1 or self.pipeline_stages > 1)

    @property
    def uses_bf16_optimizer(self) -> bool:
        """True if DeepSpeed 0.19.8 selects its BF16_Optimizer (runtime/engine.py, _do_optimizer_sanity_check)."""
        if self.precision != "bf16":
            return False
        accumulates_fp32 = self.grad_accum_dtype == "fp32" and self.offload_optimizer == "none"
        return self.zero_stage == 0 or (self.zero_stage == 1 and accumulates_fp32)

    def with_batch(self, *, micro_batch_size: int, gradient_accumulation_steps: int) -> "Layout":
        """Return the layout with other batch sizes. A search makes thousands: `replace` takes several times as long."""
        changed = object.__new__(Layout)
        changed.__dict__.update(vars(self), micro_batch_size=micro_batch_size,
                                gradient_accumulation_steps=gradient_accumulation_steps)
        return changed

    def check(self) -> "Layout":
        """Return self. Raises ConfigError for unknown choices and degrees that do not divide the ranks."""
        for name in ("world_size", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
                     "expert_parallel_size", "micro_batch_size", "gradient_accumulation_steps", "seq_length"):
            if getattr(self, name) < 1:
                raise ConfigError(name, found=getattr(self, name), expected="at least 1")
        ranks_per_replica = self.pipeline_stages * self.tensor_parallel_size * self.sequence_parallel_size
        if self.world_size % ranks_per_replica:
            raise ConfigError("world_size", found=f"{self.world_size} ranks",
                              expected=f"a multiple of {ranks_per_replica}: "
                              "pipeline stages x tensor-parallel x sequence-parallel ranks")
        if self.stage_size % self.expert_parallel_size:
            raise ConfigError("expert_parallel_size", found=self.expert_parallel_size,
                              expected=f"a divisor of the {self.stage_size} ranks of a pipeline stage")
        for name, choices in (("precision", tuple(DTYPE_BYTES)), ("zero_stage", (0, 1, 2, 3)),
                              ("offload_optimizer", ("none", "cpu", "nvme")),
                              ("offload_param", ("none", "cpu", "nvme")), ("device_kind", ("cpu", "cuda"))):
            if getattr(self, name) not in choices:
                raise ConfigError(name, found=repr(getattr(self, name)), expected=f"one of {choices}")
        return self


LAYOUT_FIELDS = tuple(item.name for item in fields(Layout))
_DEFAULTS: dict[str, Any] = {item.name: item.default for item in fields(Layout)}
_ZERO, _OPTIMIZER, _PARAM = ("zero_optimization", "zero_optimization.offload_optimizer",
                             "zero_optimization.offload_param")
# (field, key of the JSON); the field's default is DeepSpeed's. Of two keys of a field, the later one is used.
_FIELD_KEYS = (
    ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("sequence_parallel_size", "sequence_parallel_size"),
    ("pipeline_stages", "pipeline.stages"),
    ("activation_checkpoint_interval", "pipeline.activation_checkpoint_interval"),
    ("offload_activations", "activation_checkpointing.cpu_checkpointing"),
    ("aio_block_bytes", "aio.block_size"),
    ("aio_intra_op_parallelism", "aio.intra_op_parallelism"),
    *((name, f"{_ZERO}.{name}") for name in ("contiguous_gradients", "reduce_scatter", "round_robin_gradients",
                                             "parameter_alignment")),
    *((name, f"{_ZERO}.{prefix}{name}") for name in SIZE_KEYS for prefix in ("", "stage3_")),
    ("offload_optimizer_pinned", f"{_OPTIMIZER}.pin_memory"),
    ("offload_optimizer_buffer_count", f"{_OPTIMIZER}.buffer_count"),
    ("offload_optimizer_ratio", f"{_OPTIMIZER}.ratio"),
    ("offload_pipeline_read", f"{_OPTIMIZER}.pipeline_read"),
    ("offload_pipeline_write", f"{_OPTIMIZER}.pipeline_write"),
    ("offload_param_pinned", f"{_PARAM}.pin_memory"),
    ("offload_param_buffer_count", f"{_PARAM}.buffer_count"),
    ("offload_param_buffer_size", f"{_PARAM}.buffer_size"),
    ("offload_param_max_in_cpu", f"{_PARAM}.max_in_cpu"),
)


def parse_layout(config: Mapping[str, Any], *, world_size: int, seq_length: int, device_kind: str,
                 name: str = "", **of_flags: Any) -> Layout:
    """Parse the layout from a DeepSpeed JSON that has no "auto" values and no old key names.

    Keys that are missing or null have DeepSpeed's defaults. `of_flags` are the fields that flags set. Raises
    ConfigError for invalid values.
    """
    get = _Getter(config)
    tensor_parallel_size = max(get.integer(f"tensor_parallel.{key}", 1)
                               for key in ("autotp_size", "tp_size", "tensor_parallel.tp_size", "tp.tp_size"))
    zero_stage = get.integer(f"{_ZERO}.stage", 0)
    method = str(get("pipeline.partition_method", get("pipeline.partition", DEFAULT_PARTITION_METHOD)))
    return Layout(
        name=name, world_size=world_size, seq_length=seq_length, device_kind=device_kind, zero_stage=zero_stage,
        tensor_parallel_size=max(1, tensor_parallel_size),
        expert_parallel_size=get.integer("expert_parallel.autoep_size", 1) if get("expert_parallel.enabled") else 1,
        hpz_partition_size=max(1, get.integer(f"{_ZERO}.zero_hpz_partition_size", 1)),
        # DeepSpeed's default is true at ZeRO stage 3. Below stage 2, its PipelineEngine sets the key to false.
        overlap_comm=zero_stage >= 2 and bool(get(f"{_ZERO}.overlap_comm", zero_stage == 3)),
        offload_optimizer=str(get(f"{_OPTIMIZER}.device", "none")).lower(),
        # DeepSpeed reads the block at stage 3 only
        offload_param=str(get(f"{_PARAM}.device", "none")).lower() if zero_stage == 3 else "none",
        partition_method=PARTITION_METHODS.get(method.lower(), method),
        **dict(get.field(field, key) for field, key in _FIELD_KEYS if get(key) is not None),
        **_precision(get), **_optimizer(get), **of_flags).check()


class _Getter:
    """Reads dotted keys of a JSON; null counts as missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __call__(self, dotted: str, default: Any = None) -> Any:
        value = get_value(self.config, dotted)
        return default if value is None else value

    def integer(self, dotted: str, default: int) -> int:
        value = self(dotted, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(dotted, found=repr(value), expected="a number")
        return int(value)

    def field(self, name: str, dotted: str) -> tuple[str, Any]:
        """Return a field of the layout, with the value of its key in the type of its default."""
        kind = type(_DEFAULTS[name])
        return name, self.integer(dotted, 0) if kind is int else kind(self(dotted))


def _precision(get: _Getter) -> dict[str, Any]:
    precision = next((name for name in ("bf16", "fp16") if get(f"{name}.enabled") is True), "fp32")
    states_16bit = get("bf16.bf16_optimizer_states", False) or not get("optimizer.params.fp32_optimizer_states", True)
    return {"precision": precision, "grad_accum_dtype": get("data_types.grad_accum_dtype"),
            "masters_in_16bit": bool(get(f"{precision}.{precision}_master_weights_and_grads", False)),
            "moments_in_16bit": bool(states_16bit)}


def _optimizer(get: _Getter) -> dict[str, Any]:
    kind = str(get("optimizer.type", "AdamW")).lower()
    row = OPTIMIZERS.get(kind)
    tensors = 2 if row is None else \
        row.states + sum(bool(get(f"optimizer.params.{name}", 0)) for name in row.states_of_params)
    return {"optimizer": kind, "optimizer_moments": tensors,
            "torch_optimizer": row is None or row.from_torch or bool(get("optimizer.params.torch_adam", False)
                                                      and not get("optimizer.params.fused", False))}
