"""The plan of a run: everything that the engine and the step loop need."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.flags.arguments import RunArguments, data_spec
from pretrain.config.flags.overrides import OverrideRecord
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import Origin
from pretrain.config.run_length import RunLength
from pretrain.config.schedule import Schedule
from pretrain.data.data_spec import DataSpec
from pretrain.data.token_schedules import SeqLengths
from pretrain.distributed.device import Device
from pretrain.model.config import ModelConfig

if TYPE_CHECKING:  # tools that only read JSONs import neither numpy nor tokenizers
    from pretrain.data.samples.dataset import SampleDataset
    from pretrain.data.samples.read_order import ReadOrder
    from pretrain.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """A run: its settings, its data, and what its earlier starts have determined.

    `resolve.py` makes it from flags, JSON and model; `validate.py` checks it and adds the data;
    `checkpoint/load/resume.py` adds what the checkpoint determines, if there is one. Without data, a plan can build an
    engine but cannot train.
    """

    args: RunArguments
    file: DsFile  # the DeepSpeed JSON as it was given
    ds_config: dict[str, Any]  # complete, as handed to deepspeed.initialize
    model: ModelConfig  # with the dropouts of the flags
    device: Device
    layout: Layout
    length: RunLength  # steps, and the global batch size of each
    seq_lengths: SeqLengths  # of training; evaluations always use --seq_length
    schedule: Schedule | None  # learning rate by applied steps; None: the JSON has its own scheduler
    schedule_flags: dict[str, Any]  # flags or JSON keys that planned the learning rates
    notes: tuple[str, ...]  # settings that have no effect or may surprise, one line each
    datasets: dict[str, "SampleDataset"] = field(default_factory=dict)  # by the names that `RunData` describes
    tokenizer: "Tokenizer | None" = None
    eod_token: int | None = None  # end-of-document token
    unigram_entropy: float | None = None  # nats a token, of the training data; None: no data
    inputs: Mapping[str, Any] = field(default_factory=dict)  # by extension: see Extension.inputs
    overrides: tuple[OverrideRecord, ...] = ()  # changes by --override so far
    lineage: tuple[dict[str, Any], ...] = ()  # branches that led to this run, the oldest first: Branch.record
    origin: Origin | None = None  # source of the weights at step 0; None: random weights

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value of a dotted key of `ds_config`."""
        return get_value(self.ds_config, dotted, default)

    @cached_property
    def data(self) -> DataSpec:
        """The data as the flags name it."""
        return data_spec(self.args)

    @property
    def read_order(self) -> "ReadOrder":
        """The samples of the training data at each data position."""
        from pretrain.data.samples.read_order import read_order

        return read_order(self.args.skip_samples, self.args.reorder_samples, self.args.first_sample)

    @property
    def train_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.length.train_steps

    @property
    def last_step(self) -> int:
        """Step after which this process stops: --exit_step, or the last step of the run."""
        return self.length.last_step(self.args.exit_step)

    @property
    def epochs(self) -> float:
        """Number of times that the run reads its training data."""
        return self.length.samples / self.datasets["train"].samples_per_epoch
