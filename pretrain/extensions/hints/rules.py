"""The rules: each looks for one fault in the curve of a run. A healthy run gets no hint.

A value counts only if it differs from what a healthy curve would show by several of its own standard errors, which are
estimated from the curve itself. `tests/extensions/hints/test_rules.py` has the runs on which the limits were tested.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pretrain.active_extensions import advice_on
from pretrain.config.schedule import KINDS
from pretrain.errors import format_number
from pretrain.monitor.curve import Curve, Facts, Hint
from pretrain.monitor.noise import Estimate, level, line

_MOST = 3  # hints at a time
_ROWS = 20  # fewer rows after the warm-up show nothing but noise
# standard errors; a run is looked at about 100 times, by some ten rules: with 4, one in 30 runs would get a false hint
_ERRORS = 5.0
# in the loss: a doubling of the tokens lowers it by 2 to 7% (Hoffmann et al. 2022, up to 100 times the optimal tokens)
_SMALL = 0.01


@dataclass(frozen=True)
class Rule:
    """A kind of hint. `find` returns what is seen, or "". `explains`: consequences, which are not named as well."""

    name: str
    find: Callable[[Curve, Facts], str]
    remedy: str  # extensions may advise more under the name of the rule
    explains: tuple[str, ...] = ()


def find_hints(curve: Curve, facts: Facts) -> list[Hint]:
    """Return what the curve shows: at most three hints, the most important first."""
    found: list[Hint] = []
    explained: set[str] = set()
    if not curve.num_rows:
        return []
    for rule in RULES:
        if rule.name not in explained and (text := rule.find(curve, facts)):
            found.append(Hint(rule.name, text, "; ".join([rule.remedy, *advice_on(rule.name)])))
            explained.update(rule.explains)
    return found[:_MOST]


def _diverges(curve: Curve, facts: Facts) -> str:
    """The last loss is above ln(V) and above the first one; or a lasting rise after the warm-up."""
    first, loss = curve["loss"][0], curve["loss"][-1]
    if curve.steps - curve["step"][0] >= 9 and loss > max(facts.log_v, first + 0.1):
        return (f"the loss has risen from {first:.2f} to {loss:.2f}, above the loss of equal probabilities, "
                f"ln({facts.vocab_size}) = {facts.log_v:.2f} (peak learning rate {facts.peak(curve['lr']):g})")
    settled = curve.settled
    if settled.num_rows < 2 * _ROWS or facts.mixes_data:
        return ""
    parts = [level(part) for part in np.array_split(settled["loss"], 8)]
    lowest = min(range(8), key=lambda number: parts[number].value)
    rise = _difference(parts[-1], parts[lowest])
    is_lasting = lowest < 6 and parts[-2].value > parts[lowest].value + 2 * parts[lowest].error
    if not is_lasting or rise.value < max(_ERRORS * rise.error, _SMALL * parts[lowest].value):
        return ""
    lowest_step = np.array_split(settled["step"], 8)[lowest][-1]
    return (f"the training loss rises: its mean was {parts[lowest].value:.4g} around step {lowest_step:.0f} and is "
            f"{parts[-1].value:.4g} now, which is {rise.value / max(rise.error, 1e-12):.0f} standard errors more")


def _rate_too_high(curve: Curve, facts: Facts) -> str:
    """Large updates, whose sum exceeds the norm of the weights, together with a loss that suffers from them."""
    settled = curve.settled
    high = settled.part(settled["lr"] > 0.5 * facts.peak(curve["lr"]))
    ratio = _median(high["update_ratio"])
    if not facts.has_adam or high.num_rows < _ROWS // 2 or not ratio > _LARGE_UPDATE or _path(high) < 1:
        return ""
    evidence = _harm(curve, facts, path=_path(high))
    return evidence and (f"each update changes the weights by {ratio:.1%} of their norm (peak learning rate "
                         f"{facts.peak(curve['lr']):g}), and the loss {evidence}")


def _harm(curve: Curve, facts: Facts, *, path: float) -> str:
    """Return what is wrong with the loss while updates are large; "" if it falls as it should."""
    highest = np.nanmax(np.where(curve["step"] > 9, curve["loss"], np.nan), initial=-math.inf)
    loss, entropy = _median(curve["loss"][-5:]), facts.unigram_entropy or 0.0
    if highest > max(facts.log_v, curve["loss"][0] + 0.1):
        return f"rose to {highest:.2f}, above ln({facts.vocab_size}) = {facts.log_v:.2f}, and is {loss:.4g} now"
    if path > 3 and loss > 0.85 * entropy > 0 and not facts.label_smoothing:
        return f"is still {loss:.4g}, near the unigram entropy of the data, {entropy:.2f}"
    return next((text for text, rule in (("rises", _diverges), ("swings", _oscillates), ("is flat", _plateau))
                 if rule(curve, facts)), "")


# Relative sizes of AdamW's updates, medians at the peak rate. In models of width 64 and 512 that were trained for 200
# steps with rates from 2^-11 to 2^-4, the best rates had 0.002 to 0.009, and 0.015 cost about 0.15 nats; a run of 600
# steps with 0.02 profited from it when the rate decayed (2026-11-24).
_LARGE_UPDATE = 1.5e-2
_SMALLEST_UPDATE = 1e-5  # any optimizer; bf16 rounds changes below 2e-3
_SHORTEST_PATH = 0.1  # sum over the run; the best rates have 0.3 in 200 steps


def _rate_too_low(curve: Curve, facts: Facts) -> str:
    """An update is too small to change anything, or all updates of the run together are."""
    peak, rate, ratio = facts.peak(curve["lr"]), curve["lr"][-1], curve["update_ratio"][-1]
    skipped = curve["skipped_steps"][-2:]
    is_skipped = len(skipped) == 2 and skipped[1] > skipped[0]  # the update of this step may be one of them
    if curve.steps > 1 and not is_skipped and rate > 0.1 * peak and ratio * peak / rate < _SMALLEST_UPDATE:
        return (f"an update changes the weights by {ratio:.0e} of their norm, and those of healthy runs by 1e-4 to 1e-2"
                f" (peak learning rate {peak:g})")
    settled, total = curve.settled, facts.train_steps or math.nan
    if not facts.has_adam or not facts.is_new or settled.num_rows < _ROWS:
        return ""
    path = _path(settled) / (settled.steps - settled["step"][0]) * total
    if not path < _SHORTEST_PATH:
        return ""
    return (f"all updates of the {total:.0f} steps together change the weights by at most {path:.1%} of their norm "
            f"(peak learning rate {peak:g}, loss {_median(settled['loss'][-5:]):.4g})")


def _path(curve: Curve) -> float:
    """Return the sum of the relative sizes of all updates between the first and the last row."""
    return float(np.nansum(curve["update_ratio"][1:] * np.diff(curve["step"])))


def _no_learning(curve: Curve, facts: Facts) -> str:
    """The loss is not below the unigram entropy, and does not fall."""
    settled, entropy = curve.settled, facts.unigram_entropy
    if settled.num_rows < _ROWS or facts.label_smoothing or facts.mixes_data:
        return ""
    late = settled.part(settled["step"] > 0.5 * (settled["step"][0] + settled.steps))
    if late.num_rows < _ROWS // 2:
        return ""
    slope, mean = line(late["step"], late["loss"])
    limit = entropy if entropy is not None else facts.log_v if facts.is_new else math.nan
    falls = -slope.value > _ERRORS * slope.error
    if not mean.value > 0.97 * limit or falls:
        return ""
    what = f"the unigram entropy of the data, {limit:.2f}" if entropy is not None else f"ln(V) = {limit:.2f}"
    return (f"the loss does not fall: it is {mean.value:.3f} since step {late['step'][0]:.0f}, and {what}, is what a "
            "model reaches that only knows how frequent each token is")


def _memorizes(curve: Curve, facts: Facts) -> str:
    loss = curve["loss"][-1]
    if not loss < 0.05:  # nats; the best models of text and code have 0.3 for each byte
        return ""
    return (f"the loss is {loss:.2g}, and no text is so predictable: the data is constant or repeats itself, or the "
            f"model has memorized it{_epochs_text(curve, facts)}")


def _gradients_grow(curve: Curve, facts: Facts) -> str:
    early, late = _ends(curve.settled["grad_norm"])
    if not late > 10 * early:
        return ""
    return f"the gradient norm grows: its median was {format_number(early)} after the warm-up and is " \
           f"{format_number(late)} now"


def _gradients_vanish(curve: Curve, facts: Facts) -> str:
    early, late = _ends(curve.settled["grad_norm"])
    if not late < 1e-3 * early or curve["loss"][-1] < 0.3:
        return ""
    return f"the gradient norm vanishes: its median was {early:.3g} after the warm-up and is {late:.2g} now"


def _oscillates(curve: Curve, facts: Facts) -> str:
    """The loss swings with one period, in both halves of the curve, by more than the noise."""
    settled = curve.settled
    settled = settled.part(slice(settled.num_rows // 4, None))
    if settled.num_rows < 4 * _ROWS:
        return ""
    halves = [_swing(part) for part in np.array_split(settled["loss"], 2)]
    periods, swings = [period for period, _ in halves], [swing for _, swing in halves]
    mean = float(settled["loss"].mean())
    if max(periods) > 1.5 * min(periods) or not min(swings) > max(2 * settled.noise, _SMALL * mean):
        return ""
    rows = settled.num_rows / (settled.steps - settled["step"][0])
    return (f"the loss swings by {np.mean(swings):.2g} around {mean:.4g}, with a period of about "
            f"{np.mean(periods) / rows:.0f} steps")


def _swing(losses: np.ndarray) -> tuple[float, float]:
    """Return the period, in rows, and the height of the strongest swing; a height of 0 if it may be noise."""
    x = np.linspace(-1, 1, len(losses))
    polynomial = np.polynomial.polynomial
    power = np.abs(np.fft.rfft(losses - polynomial.polyval(x, polynomial.polyfit(x, losses, 3)))) ** 2
    power[:2] = 0.0
    peak = int(np.argmax(power))
    # Fisher's test: the probability that noise has a peak with this fraction of the power
    probability = len(power) * (1 - power[peak] / power.sum()) ** (len(power) - 1) if power[peak] else 1.0
    return len(losses) / max(peak, 1), 4 * math.sqrt(power[peak]) / len(losses) if probability < 1e-5 else 0.0


def _valid_differs(curve: Curve, facts: Facts) -> Iterator[str]:
    """Yield a text if the validation loss rises while the training loss falls, and if it is far above it."""
    steps, losses = curve.evaluations["step"], curve.evaluations["eval_loss"]
    settled, known = curve.settled, np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    if len(steps) < 2 or settled.num_rows < _ROWS:
        return
    error = settled.noise / math.sqrt(facts.eval_steps)  # an evaluation is a mean over batches of the same noise
    limit = max(_ERRORS * math.sqrt(2) * error, _SMALL * losses[-1])

    def training(at: int) -> Estimate:
        first = 0.5 * (steps[at] + (steps[at - 1] if at else 0))
        rows = settled["loss"][(settled["step"] >= first) & (settled["step"] <= steps[at])]
        return level(rows) if len(rows) >= 4 else Estimate(math.nan, math.nan)

    best = int(np.argmin(losses))
    now, then, last = training(-1), training(best), losses[-1]
    if best < len(losses) - 2 and min(losses[-2:]) - losses[best] > limit and now.value < then.value:
        yield (f"the validation loss has risen from {losses[best]:.4g} at step {steps[best]:.0f} to {last:.4g}, while "
               f"the training loss fell from {then.value:.4g} to {now.value:.4g}")
    gap = last - now.value
    is_mean = np.isfinite(curve.evaluations["mean_of_sets"]).any()  # over sets that may be other texts on purpose
    if not is_mean and gap > max(0.2 * (facts.log_v - now.value), _ERRORS * now.error, limit):
        yield f"the validation loss, {last:.4g}, is {gap:.2g} above the training loss, {now.value:.4g}"


def _repeats(curve: Curve, facts: Facts) -> str:
    """A gap between training and validation in data that was read more than once."""
    text = _memorizes(curve, facts)
    return text or next((f"{text}{_epochs_text(curve, facts)}" for text in _valid_differs(curve, facts)
                         if _epochs(curve, facts) > 1), "")


def _gap(curve: Curve, facts: Facts) -> str:
    return next(_valid_differs(curve, facts), "")


def _epochs(curve: Curve, facts: Facts) -> float:
    """Return how often the training data was read; NaN if it is not known."""
    return float(curve["consumed_samples"][-1]) / facts.samples_per_epoch if facts.samples_per_epoch else math.nan


def _epochs_text(curve: Curve, facts: Facts) -> str:
    epochs = _epochs(curve, facts)
    return f" (the training data was read {epochs:.1f} times)" if math.isfinite(epochs) else ""


def _plateau(curve: Curve, facts: Facts) -> str:
    """The loss falls no longer although the learning rate is not small.

    In a power law of the steps, each doubling lowers the loss by somewhat less than the one before. Here the last one
    lowers it by less than half as much as the one before, and not at all as far as the noise shows; or, where the noise
    is small enough to see it, by less than 0.5%, as after 1,000 times the optimal tokens.
    """
    settled = curve.settled
    if settled.num_rows < 2 * _ROWS or settled["lr"][-1] < 0.3 * facts.peak(curve["lr"]) or facts.mixes_data:
        return ""
    steps = settled["step"]
    late, early = (settled.part((steps > settled.steps / scale) & (steps <= 2 * settled.steps / scale))
                   for scale in (2, 4))
    if min(late.num_rows, early.num_rows) < _ROWS // 2:
        return ""
    (fall, mean), (before, _) = (line(np.log2(part["step"]), part["loss"]) for part in (late, early))
    change, earlier = -fall.value, -before.value
    slowed = 0.5 * earlier - change > _ERRORS * math.hypot(fall.error, 0.5 * before.error)
    if not (change < 3 * fall.error and slowed) and not change + _ERRORS * fall.error < 0.5 * _SMALL * mean.value:
        return ""
    return (f"the loss is flat: it changed by {-change:+.2g} (standard error {fall.error:.1g}) around {mean.value:.4g} "
            f"in steps {late['step'][0]:.0f} to {late.steps:.0f}")


def _clips_all(curve: Curve, facts: Facts) -> str:
    """Even the smallest gradients are far above the limit, which is there for the exceptional ones."""
    settled = curve.settled
    late = settled.part(slice(settled.num_rows // 2, None))
    if settled.num_rows < _ROWS or not np.all(late["clip_rate"] >= 1):
        return ""
    factor = float(np.min(late["grad_norm"] / late["clip_norm"]))
    if not factor > 3:
        return ""
    return (f"every gradient is clipped: the norms are {np.min(late['grad_norm']):.3g} to "
            f"{np.max(late['grad_norm']):.3g}, at least {factor:.1f} times the limit of {late['clip_norm'][-1]:g}")


def _schedule(curve: Curve, facts: Facts) -> str:
    """The lowest rate long before the end of the run, or not at its end."""
    total, settled, schedule = facts.train_steps, curve.settled, facts.schedule
    if not total or curve.num_rows < _ROWS:
        return ""
    if schedule is not None:
        kind = schedule.get("kind")
        if kind not in KINDS or not KINDS[kind].decays:
            return ""
        end = schedule.get("decay_steps", total)
        if end > 1.25 * total and kind != "wsd":  # without its decay, wsd is a phase that other runs continue
            return (f"the learning rate would reach its lowest value at step {end}, and the run ends at step {total}, "
                    "with a rate that is still high")
    else:
        rates = settled["lr"]
        lowest = np.flatnonzero(rates > 1.001 * np.min(rates, initial=math.inf))
        end = settled["step"][lowest[-1]] if len(lowest) and len(rates) - lowest[-1] > 10 else total
        if not np.min(rates, initial=math.inf) < 0.3 * facts.peak(curve["lr"]):
            return ""
    if end >= 0.8 * total:  # GPT-3 was trained with the lowest rate in the last 13% (Brown et al. 2020, appendix B)
        return ""
    return (f"the learning rate is at its lowest from step {end:.0f} on, and the run has {total} steps: "
            f"{1 - end / total:.0%} of them learn little")


def _waits_for_data(curve: Curve, facts: Facts) -> str:
    late = curve.part(slice(max(curve.num_rows // 2, 1), None))
    waiting, total = late["data_time_ms"], late["step_time_ms"]
    if late.num_rows < _ROWS // 2 or not np.median(waiting / total) > 0.1:
        return ""
    return f"a step waits {format_number(np.median(waiting))} ms of its {format_number(np.median(total))} ms for data"


def _launches(curve: Curve, facts: Facts) -> str:
    """On a GPU, a block of the model takes less time than a CPU needs to launch its kernels."""
    late = curve.part(slice(max(curve.num_rows // 2, 1), None))
    compute, mfu = _median(late["forward_time_ms"] + late["backward_time_ms"]), _median(late["mfu_exact"])
    if late.num_rows < _ROWS // 2 or not facts.blocks or not (mfu < 0.15 and compute / facts.blocks < 1.0):
        return ""
    return (f"the GPU waits for the CPU, which launches its kernels: the MFU is {mfu:.1%}, and the forward and "
            f"backward pass of a block take {1e3 * compute / facts.blocks:.0f} us")


RULES = (
    Rule("rate_too_high", _rate_too_high, "use a lower learning rate",
         explains=("divergence", "oscillation", "no_learning", "plateau", "exploding_gradients")),
    Rule("divergence", _diverges, "use a lower learning rate, or a longer --lr_warmup_steps, and return to a "
         "checkpoint from before the rise (--resume_from)",
         explains=("plateau", "gap", "repeated_data", "no_learning")),
    Rule("rate_too_low", _rate_too_low, "use a higher learning rate",
         explains=("no_learning", "plateau", "clipping")),
    Rule("no_learning", _no_learning, "check data, model and learning rate",
         explains=("plateau",)),
    Rule("exploding_gradients", _gradients_grow, "lower the learning rate, or raise the weight decay"),
    Rule("vanishing_gradients", _gradients_vanish, "--init_std and --output_init_method change how the layers "
         "begin", explains=("plateau",)),
    Rule("oscillation", _oscillates, "lower the learning rate or raise --global_batch_size; if the period is that of "
         "the data, shuffle it (--sample_order)", explains=("plateau", "gap", "repeated_data")),
    Rule("repeated_data", _repeats, "use more data, fewer --train_steps, or --early_stopping_patience",
         explains=("gap", "plateau")),
    Rule("gap", _gap, "check that --valid_data is text of the same kind as --train_data"),
    Rule("schedule", _schedule, "give --lr_decay_steps (in the JSON's scheduler: the total number of steps) the value "
         "of --train_steps", explains=("plateau",)),
    Rule("plateau", _plateau, "let the rate decay (--lr_schedule wsd), stop here, or train a larger model"),
    Rule("clipping", _clips_all, "raise --gradient_clipping above the usual norm (\"gradient_clipping\" in the JSON), "
         "or use --adaptive_clipping"),
    Rule("data_bound", _waits_for_data, "copy the data to a local disk, or give the ranks more CPU cores"),
    Rule("launch_bound", _launches, "use a larger --micro_batch_size, or --compile_blocks"),
)
"""all rules, the most important first"""


def _difference(one: Estimate, other: Estimate) -> Estimate:
    return Estimate(one.value - other.value, math.hypot(one.error, other.error))


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Return the medians of the first and the last eighth; NaN if there are few values."""
    if len(values) < 2 * _ROWS:
        return math.nan, math.nan
    parts = np.array_split(values, 8)
    return _median(parts[0]), _median(parts[-1])


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
