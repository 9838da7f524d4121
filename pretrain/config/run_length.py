"""Length of a run in steps, samples and tokens, with a batch size that may change."""

from dataclasses import dataclass

from pretrain.data.token_schedules import BatchSizes


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
