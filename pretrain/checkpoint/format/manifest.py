"""`manifest.json`, which describes a checkpoint: its fields, its text, and the manifest of a run. Imports no torch.

`run_checkpoints.py` reads it from the folders of a run. A checkpoint is good unless its manifest says that a tensor
holds NaN or infinity.
"""

import hashlib
import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pretrain.checkpoint.format.hashed_files import FileRecord
from pretrain.config.flags.check_flags import RECIPE_FLAGS, OverrideRecord
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import DROPOUTS, Branch, Origin, initialization_of
from pretrain.config.schedule import Schedule
from pretrain.errors import counted
from pretrain.model.init_methods import Initialization
from pretrain.stored_json import build, parse_json

if TYPE_CHECKING:
    from pretrain.config.plan import Plan

MANIFEST = "manifest.json"
NOT_FINITE = "the weights or optimizer states have NaN or infinite values"  # in messages about such a checkpoint
_HASH_KEY = "sha256"
SCHEDULED_BY_FLAGS = "the flags"  # value of `Manifest.scheduler` if flags set the learning-rate schedule


class _TypeAndParams(TypedDict, total=False):
    """A block "optimizer" or "scheduler" of the DeepSpeed JSON."""

    type: str
    params: dict[str, Any] | None


class _RecipeStates(TypedDict, total=False):
    """States of parts of the core by name: see engine/recipe.py. Those of extensions have any form."""

    early_stopping: "_EarlyStoppingState | None"
    adaptive_clipping: list[float] | None
    noise_scale: list[float] | None
    spikes: "_SpikeValues | None"


class _SpikeValues(TypedDict, total=False):
    """The newest values, of which a resumed run knows what is usual."""

    loss: list[float]
    grad_norm: list[float]


class _EarlyStoppingState(TypedDict):
    best: float | None
    best_step: int
    evaluations: int


@dataclass(frozen=True)
class _Dropouts:
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0


class AveragedRecord(TypedDict):
    """A checkpoint of an average."""

    folder: str
    step: int
    weight: float
    manifest_sha256: str


class DataRecord(TypedDict, total=False):
    """The facts about the data that a checkpoint records besides the fingerprint: of one source, or of each source."""

    sha256: str | None
    bin_bytes: int
    bin_mtime_ns: int
    idx_bytes: int
    first_token: int
    last_token: int
    sample_order: str
    order_samples: int
    packing: str
    items: int  # number of items of a dataset of --dataset_module, which has no files
    own_fingerprint: str  # as its fingerprint() returned it
    prefix: str  # prefix of one of several sources
    sources: "list[DataRecord]"  # in the order of `SampleDataset.sources`
    proportions: "list[Proportions]"


class AdoptedRecord(TypedDict, total=False):
    """The run of another program that a checkpoint was adopted from."""

    program: str
    folder: str
    unknown: list[str]  # fields of the manifest that the program does not record: they have any value
    learning_rate: float | None  # rate of its last step
    next_rate: float | None  # learning rate of the step after that
    skipped_steps: int  # steps that fp16 skipped, included in the count of steps
    losses: dict[str, str]  # what was not taken over, by the names of --accept_without, and why


class Proportions(TypedDict):
    """Fraction of each source in the samples from this one on."""

    from_samples: int
    weights: list[float]


# fields that a manifest and the layout of a run have in common
LAYOUT_KEYS = ("world_size", "zero_stage", "pipeline_stages", "tensor_parallel_size", "sequence_parallel_size",
               "expert_parallel_size", "precision", "grad_accum_dtype", "offload_optimizer", "offload_param",
               "seq_length")


@dataclass(frozen=True)
class Manifest:
    """Training position, layout, model and files of one checkpoint."""

    step: int  # completed optimizer steps, including steps that fp16 skipped
    consumed_samples: int
    world_size: int
    data_parallel_size: int
    pipeline_stages: int
    zero_stage: int
    precision: str
    grad_accum_dtype: str | None
    offload_optimizer: str
    offload_param: str
    optimizer: Annotated[dict[str, Any], _TypeAndParams]
    global_batch_size: int
    seed: int
    seq_length: int
    model: dict[str, Any]  # the transformers config.json
    data_fingerprint: str
    tokenizer_fingerprint: str | None
    versions: dict[str, str]
    eval_loss: float | None = None  # validation loss at this step; None: no evaluation at this step, or not finite
    loss_scale: dict[str, float] | None = None  # state of fp16's loss scaler; None: another precision
    recipe_states: Annotated[dict[str, Any], _RecipeStates] = field(default_factory=dict)  # {}: no state
    initialization: Annotated[dict[str, Any], Initialization] = field(default_factory=dict)
    no_weight_decay: list[str] = field(default_factory=list)  # the patterns of --no_weight_decay, sorted
    dropouts: Annotated[dict[str, Any], _Dropouts] = field(default_factory=dict)  # {}: as in `model`
    scheduler: str = ""  # type of the JSON's scheduler, or SCHEDULED_BY_FLAGS
    document_attention: bool = False
    save_id: str = ""  # distinguishes two saves of the same step
    finite: bool | None = None  # whether weights and optimizer states have neither NaN nor infinity; None: not recorded
    weights_only: bool = False  # the checkpoint has no optimizer states and no data position: imported weights
    origin: Annotated[dict[str, str], Origin] | None = None  # source of the weights at step 0; None: random
    adopted: AdoptedRecord | None = None  # None: this program has written the checkpoint
    averaged: list[AveragedRecord] = field(default_factory=list)  # checkpoints whose average this is
    data: Annotated[dict[str, Any], DataRecord] | None = None  # None: not known, as of imported weights
    schedule: dict[str, Any] | None = None  # fields of Schedule, or the JSON's scheduler; None: not known
    schedule_flags: dict[str, Any] = field(default_factory=dict)  # flags or JSON keys that planned `schedule`
    recipe: dict[str, Any] = field(default_factory=dict)  # gradient clipping, and the flags in RECIPE_FLAGS
    overrides: list[OverrideRecord] = field(default_factory=list)  # changes by --override so far
    lineage: list[Annotated[dict[str, Any], Branch]] = field(default_factory=list)  # branches, the oldest first
    tensor_parallel_size: int = 1
    sequence_parallel_size: int = 1
    expert_parallel_size: int = 1
    files: dict[str, FileRecord] = field(default_factory=dict)  # key: path within the folder, with "/" as separator

    @property
    def is_good(self) -> bool:
        """False if the checkpoint holds NaN or infinity; then no run resumes from it."""
        return self.finite is not False

    @property
    def unknown(self) -> frozenset[str]:
        """Names of the fields that an adopted run did not record: a resume compares them with nothing."""
        return frozenset((self.adopted or {}).get("unknown", ()))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {name: record.bytes for name, record in self.files.items()}

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        return sum(record.bytes for record in self.files.values())

    @property
    def layout(self) -> Layout:
        """Layout of the run that wrote the checkpoint.

        Values that the manifest does not record, such as the micro-batch size, have their defaults. Therefore use the
        `global_batch_size` of the manifest, not the layout's. The layout of imported weights is one rank without
        an optimizer.
        """
        return Layout(**{name: getattr(self, name) for name in LAYOUT_KEYS},
                      optimizer=str(self.optimizer.get("type", "")).lower())

    @property
    def layout_text(self) -> str:
        """Layout of the run that wrote the checkpoint, such as "4 ranks, ZeRO-1".

        With pipeline stages, or tensor- or sequence-parallel ranks, "2 stages x 2 tensor-parallel x 2 data-parallel"
        follows; with expert parallelism, "experts divided over 2 ranks"; with offload, "optimizer on cpu".
        """
        if self.weights_only:
            return "weights only"
        if self.adopted is not None:
            return f"adopted: {self.adopted.get('program', '')}"
        parts = [counted(self.world_size, "rank"), f"ZeRO-{self.zero_stage}"]
        degrees = [f"{size} {name}" for size, name in (
            (self.pipeline_stages, "stages"), (self.tensor_parallel_size, "tensor-parallel"),
            (self.sequence_parallel_size, "sequence-parallel")) if size > 1]
        if degrees:
            parts.append(" x ".join([*degrees, f"{self.data_parallel_size} data-parallel"]))
        if self.expert_parallel_size > 1:
            parts.append(f"experts divided over {self.expert_parallel_size} ranks")
        for offloaded, device in (("optimizer", self.offload_optimizer), ("parameters", self.offload_param)):
            if device != "none":
                parts.append(f"{offloaded} on {device}")
        return ", ".join(parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the text, which has the hashes of all files."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def origin_in(self, folder: Path) -> Origin | None:
        """Return where the first weights of the run came from; None: random weights.

        Imported weights without a record are their own origin: the checkpoint in this folder.
        """
        if self.origin is not None:
            return Origin(**self.origin)
        return Origin(os.path.abspath(folder), os.path.abspath(folder), self.fingerprint) if self.weights_only else None

    def to_json(self) -> str:
        """Return the text of manifest.json. Its last key is a SHA-256 of all other keys, so any change is detected."""
        # Older manifests lack the other keys. Ranks compare this text, so it must equal the file's.
        return _with_hash({key: value for key, value in asdict(self).items()
                           if key in _ALWAYS_WRITTEN or value != _DEFAULTS[key]})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the text of manifest.json.

        Raises ValueError if the text is no JSON object, if its hash does not match, if a field is missing or malformed,
        or if a file is outside the checkpoint folder.
        """
        values = parse_json(text)
        if not isinstance(values, dict) or _HASH_KEY not in values:
            raise ValueError("it is not a JSON object with the key sha256")
        if _with_hash({key: value for key, value in values.items() if key != _HASH_KEY}) != text:
            raise ValueError("its content does not match the SHA-256 in it")
        return cls.from_values(values)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "Manifest":
        manifest = build(cls, {f.name: values[f.name] for f in fields(cls) if f.name in values})
        _check_schedule(manifest.schedule)
        for name in _COUNTS:
            may_be_0 = name in _MAY_BE_0 or (name == "global_batch_size" and manifest.weights_only)
            if getattr(manifest, name) < (0 if may_be_0 else 1):
                raise ValueError(f"{name} is {getattr(manifest, name)}")
        for name in manifest.files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"it names a file outside the checkpoint folder: {name}")
        return manifest


_DEFAULTS = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(Manifest)}
# all keys of the first version: those without a default, and these
_ALWAYS_WRITTEN = {*(name for name, default in _DEFAULTS.items() if default is MISSING), "eval_loss", "loss_scale",
                   "scheduler", "save_id", "files"}
_MAY_BE_0 = ("step", "consumed_samples", "zero_stage", "seed")
_COUNTS = (*_MAY_BE_0, "world_size", "data_parallel_size", "pipeline_stages", "tensor_parallel_size",
           "sequence_parallel_size", "expert_parallel_size", "global_batch_size", "seq_length")


def _check_schedule(values: dict[str, Any] | None) -> None:
    """Raise ValueError unless these are fields of Schedule, or the scheduler of a JSON.

    `schedule_from_json` reports fields and kinds that a later version has written.
    """
    known = {f.name for f in fields(Schedule)}
    if values is not None and "kind" in values:
        build(Schedule, {key: value for key, value in values.items() if key in known}, "schedule")
    elif values is not None:
        build(_TypeAndParams, values, "schedule")


def _with_hash(values: dict[str, Any]) -> str:
    text = json.dumps(values, indent=1)  # the hash is added to the text: 16,384 ranks have 50,000 files
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text[:-2]},\n "{_HASH_KEY}": "{digest}"\n}}'


def manifest_of(plan: "Plan", *, step: int, consumed_samples: int, versions: dict[str, str],
                eval_loss: float | None = None, loss_scale: dict[str, float] | None = None,
                recipe_states: dict[str, Any] | None = None, save_id: str = "") -> Manifest:
    """Return the manifest of a checkpoint that the run `plan` writes after `step` steps. Its `files` are empty."""
    layout = plan.layout
    return Manifest(
        **{name: getattr(layout, name) for name in LAYOUT_KEYS},
        step=step, consumed_samples=consumed_samples, data_parallel_size=layout.data_parallel_size,
        global_batch_size=layout.global_batch_size, optimizer=plan.ds_config["optimizer"], seed=plan.args.seed,
        model=plan.model.hf_config, data_fingerprint=plan.datasets["train"].fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint(plan),
        versions=versions, eval_loss=eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None,
        loss_scale=loss_scale, recipe_states=recipe_states or {}, initialization=asdict(initialization_of(plan.args)),
        no_weight_decay=sorted({*(plan.args.no_weight_decay or ())}),
        dropouts={name: getattr(plan.model, name) for name in DROPOUTS}, scheduler=scheduler_source(plan),
        document_attention=layout.document_attention, save_id=save_id,
        origin=asdict(plan.origin) if plan.origin else None, data=plan.datasets["train"].record(),
        schedule=schedule_record(plan), schedule_flags=plan.schedule_flags, recipe=recipe_of(plan),
        overrides=list(plan.overrides), lineage=list(plan.lineage))


def tokenizer_fingerprint(plan: "Plan") -> str | None:
    """Return the fingerprint of the run's tokenizer; None for a run without --tokenizer."""
    return plan.tokenizer.fingerprint if plan.tokenizer else None


def schedule_record(plan: "Plan") -> dict[str, Any]:
    """Return the learning-rate schedule as JSON values: fields of Schedule, or the JSON's "scheduler" block."""
    if plan.schedule is not None:
        return schedule_values(plan.schedule)
    block: dict[str, Any] = json.loads(json.dumps(plan.ds_config.get("scheduler", {})))
    return block


def schedule_values(schedule: Schedule) -> dict[str, Any]:
    """Return the fields of a schedule as JSON values."""
    return {**asdict(schedule), "milestones": list(schedule.milestones)}


def recipe_of(plan: "Plan") -> dict[str, Any]:
    """Return gradient clipping and the values of the flags in RECIPE_FLAGS."""
    return {"gradient_clipping": plan.ds_config.get("gradient_clipping"),
            **{name: getattr(plan.args, name, None) for name in RECIPE_FLAGS}}


def scheduler_source(plan: "Plan") -> str:
    """Return the source of the learning rate: the type of the JSON's scheduler, or SCHEDULED_BY_FLAGS."""
    return str(plan.ds_config.get("scheduler", {}).get("type", "")) if plan.schedule is None else \
        SCHEDULED_BY_FLAGS
