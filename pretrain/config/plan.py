"""The plan of a run: everything that the engine and the step loop need, and the length of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pretrain.config.ds_json.read import DsFile, get_value
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.flags.check_flags import OverrideRecord
from pretrain.config.layout import Layout
from pretrain.config.model_of_run import Origin
from pretrain.config.schedule import Schedule
from pretrain.data.data_spec import DataSpec
from pretrain.data.token_schedules import BatchSizes, SeqLengths
from pretrain.distributed.device import Device
from pretrain.model.config import ModelConfig

if TYPE_CHECKING:
    from pretrain.data.samples.dataset import SampleDataset
    from pretrain.data.samples.read_order import ReadOrder
    from pretrain.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class RunLength:
    """Number of steps of a run, and the conversion of tokens to steps. Tokens are counted from the run's step 0."""

    train_steps: int
    batch_sizes: BatchSizes
    seq_length: int  # tokens in a sample
    first_sample: int = 0  # data position of step 0
    steps_before: int = 0  # first steps, which had other batch sizes
    samples_before: int = 0  # that these steps read

    @property
    def samples(self) -> int:
        """Samples that the run reads."""
        return self.samples_after(self.train_steps)

    def last_step(self, exit_step: int | None) -> int:
        """Return the step after which a process with --exit_step stops."""
        return min(self.train_steps, exit_step or self.train_steps)

    def samples_after(self, steps: int) -> int:
        """Return the number of samples that the run reads in its first `steps` steps."""
        if steps < self.steps_before:
            return round(steps * self.samples_before / self.steps_before)
        position = self.first_sample + self.samples_before
        return self.batch_sizes.samples_after(steps - self.steps_before, first_sample=position) - self.first_sample

    def samples_between(self, step: int, last_step: int, *, position: int) -> int:
        """Return the number of samples that the steps after `step` read, if the data position is `position` there.

        After a rollback, a step has another data position than the run had planned.
        """
        return self.batch_sizes.samples_after(max(last_step - step, 0), first_sample=position) - position

    def tokens_after(self, steps: int) -> int:
        """Return the number of tokens that the run reads in its first `steps` steps."""
        return self.samples_after(steps) * self.seq_length

    def steps_of(self, tokens: int) -> int:
        """Return the smallest number of first steps that read at least this number of tokens."""
        samples = -(-tokens // self.seq_length)
        if samples < self.samples_before:
            return -(-samples * self.steps_before // self.samples_before)
        position = self.first_sample + self.samples_before
        return self.steps_before + self.batch_sizes.steps_until(self.first_sample + samples, first_sample=position)


def run_length(train_steps: int | None, train_tokens: int | None, *, batch_sizes: BatchSizes, seq_length: int,
               first_sample: int = 0) -> RunLength:
    """Return the length of a run of --train_steps or --train_tokens. Tokens are rounded up to complete steps."""
    length = RunLength(train_steps or 0, batch_sizes, seq_length, first_sample)
    if train_steps is not None:
        return length
    if train_tokens is None:
        raise ValueError("one of train_steps and train_tokens is required")
    return RunLength(length.steps_of(train_tokens), batch_sizes, seq_length, first_sample)


def batches_text(length: RunLength) -> str:
    """Return the global batch size of each stage of --batch_schedule that the run reaches; "" without stages."""
    sizes = length.batch_sizes
    if len(sizes.stages) == 1:
        return ""
    begins = {size: sizes.steps_until(first, first_sample=length.first_sample) + 1 for first, size in sizes.stages}
    return ", ".join(f"{size} samples from step {step:,} on" for size, step in begins.items()
                     if step <= length.train_steps)


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
    data_vocab_size: int | None = None  # of the tokenizer, or of the one that prepared the training data; None: unknown
    unigram_entropy: float | None = None  # nats a token, of the training data; None: no data
    inputs: Mapping[str, Any] = field(default_factory=dict)  # by extension: see Extension.inputs
    overrides: tuple[OverrideRecord, ...] = ()  # changes by --override so far
    lineage: tuple[dict[str, Any], ...] = ()  # branches that led to this run, the oldest first: Branch.record
    origin: Origin | None = None  # source of the weights at step 0; None: random weights

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value of a dotted key of `ds_config`."""
        return get_value(self.ds_config, dotted, default)

    @property
    def data(self) -> DataSpec:
        """The data as the flags name it."""
        return self.args.data

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
