"""The learning-rate schedule and the schedule of batches of another program, as flags."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.extensions.translate.result import Result


@dataclass(frozen=True)
class Rates:
    """The learning-rate schedule of a run, in steps, or in tokens where `unit` says so."""

    kind: str  # value of --lr_schedule
    warmup: int | None  # None: unknown, because the length of the run is
    end: int | None  # where the lowest rate is reached; None: at the end of the run
    lowest: float  # a rate
    peak: float
    unit: str = "steps"
    counts_from_0: bool = True  # as all programs do but torchtitan: each step has the rate of the one before it
    is_clipped: bool = False  # the line falls to 0 and is clipped at the lowest rate
    wsd: int | None = None  # length of the final decay of wsd
    shape: str = "linear"


def write_schedule(result: Result, rates: Rates, *, kind: Sequence[str], warmup: Sequence[str], end: Sequence[str],
                   lowest: Sequence[str], wsd: Sequence[str] = (), length: int | None = None) -> None:
    """Write the flags of a schedule; the other arguments are the settings that they come from.

    length: of the run, in the unit of the rates; None: unknown.
    """
    result.set_run("lr_schedule", rates.kind, *kind)
    least = 1 if rates.kind == "inverse_sqrt" else 0
    if rates.warmup is None:
        result.used("see what remains to do", *warmup)
    else:
        result.set_run(f"lr_warmup_{rates.unit}", max(rates.warmup, least), *warmup)
    if rates.counts_from_0 and (rates.kind != "constant" or rates.warmup != 0):
        result.set_run("lr_counts_from_0", True)
    if rates.kind == "constant":
        result.used("no effect: the rate is constant", *end, *lowest)
        return
    stop, start = rates.end, rates.warmup or 0
    if rates.is_clipped and rates.kind == "linear" and rates.lowest > 0 and rates.peak > 0 and (stop or length):
        ratio = rates.lowest / rates.peak
        stop = _end_of_clipped_line(warmup=start, end=int(stop or length or 0), ratio=ratio)
        result.differs("the line to 0 is clipped at the lowest rate there; here it ends there, with the same rates",
                       *lowest)
    if rates.kind == "inverse_sqrt":
        result.differs("MATTERS: here the rate falls until the run ends; there it is the lowest one from this step on",
                       *end)
    elif stop is not None and stop != length:
        result.set_run(f"lr_decay_{rates.unit}", max(stop, start, 1), *end)
    else:
        result.used("the decay ends with the run", *end)
    if rates.kind == "wsd" and rates.wsd is not None:
        result.set_run(f"lr_wsd_{rates.unit}", rates.wsd, *wsd)
        if rates.shape != "linear":
            result.set_run("lr_decay_shape", rates.shape, *wsd)
    result.set_run("min_lr", rates.lowest, *lowest)


def _end_of_clipped_line(*, warmup: int, end: int, ratio: float) -> int:
    """Return the step at which a line that falls from the peak to 0 at `end` reaches `ratio` of the peak.

    GPT-NeoX (megatron/learning_rates.py) clips the line at its lowest rate; here the line ends at the lowest rate.
    """
    return warmup + round((1 - ratio) * (end - warmup))


def batch_stages(ramp: Sequence[int], *, final: int, seq_length: int) -> str:
    """Return --batch_schedule for Megatron-LM's --rampup-batch-size START INCREMENT SAMPLES.

    The batch grows by INCREMENT after each of equal parts of SAMPLES (core/num_microbatches_calculator.py).
    """
    start, increment, samples = ramp
    increments = (final - start) // increment
    starts = [math.ceil(samples * number / increments) * seq_length for number in range(increments + 1)]
    return ",".join(f"{tokens}:{start + number * increment}" for number, tokens in enumerate(starts))
