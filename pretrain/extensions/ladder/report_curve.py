"""Report that the loss leaves the expected curve of --expected_curve, or returns to it, with likely causes.

Each cause is named with what the run's own rows, events and settings show about it; an earlier one leads to the next.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.active_extensions import advice_on
from pretrain.callback import Callback, Run
from pretrain.extensions.ladder.curve_watch import ABOVE, BELOW, Change, CurveWatch
from pretrain.extensions.ladder.expected_curve import OFF_CURVE, ON_CURVE, Target
from pretrain.monitor.curve import Curve, CurveLog, Facts, hints_of_extensions
from pretrain.monitor.read_run_folder import read_events

_HIGHEST_INITIAL = 1.5  # times ln(V)
_NEAR = 0.97  # fraction of the unigram entropy, as in the hint "no_learning"
_SKIPPED = 0.02  # fraction of the steps
_CLIPPED = 0.9  # fraction of the steps
_SAME_RATE = 0.01  # relative difference
_LEAK = 0.85  # fraction of the expected loss: no model of this size learns so much more from text
_DATA_EVENTS = ("data_changed", "data_replaced", "other_data")
_RATE_HINTS = ("rate_too_high", "rate_too_low", "divergence", "oscillation", "schedule")


@dataclass(frozen=True)
class Findings:
    """Facts about a run when its loss leaves the curve."""

    change: Change
    curve: Curve
    facts: Facts
    target: Target
    events: Sequence[Mapping[str, Any]]

    def hints(self, *names: str) -> Iterator[str]:
        return (hint.text for hint in hints_of_extensions(self.curve, self.facts) if hint.name in names)


def likely_causes(findings: Findings) -> list[str]:
    """Return the causes that the metrics show, each as `name: observation`; or, without any, what to do."""
    found = [f"{name}: {text}" for name, find in CAUSES for text in find(findings)]
    return found or [": ".join(["nothing in the metrics explains it", *advice_on("off_curve")])]


def _data(findings: Findings) -> Iterator[str]:
    change, curve, facts = findings.change, findings.curve, findings.facts
    for event in findings.events:
        if event["event"] in _DATA_EVENTS:
            yield f"{event['event']} at step {event['step']}"
    if facts.mixes_data:
        yield "--blend_schedule changes the texts while the run trains"
    epochs = float(curve["consumed_samples"][-1]) / facts.samples_per_epoch if facts.samples_per_epoch else 0.0
    if change.side == BELOW and epochs > 1:
        yield f"the training data was read {epochs:.1f} times, and the model repeats what it has seen"
    if change.jump is not None:
        yield f"the loss jumped by {change.jump:+.2g} at about step {change.since}: other texts may begin there"


def _labels(findings: Findings) -> Iterator[str]:
    loss, entropy = findings.change.loss, findings.facts.unigram_entropy
    if findings.change.side == ABOVE and entropy is not None and loss > _NEAR * entropy:
        yield (f"the loss is near the unigram entropy of the data, {entropy:.3g}, which a model reaches that does not "
               "use what is before a token: shuffled labels, or inputs that do not fit them")


def _initial_loss(findings: Findings) -> Iterator[str]:
    curve, facts = findings.curve, findings.facts
    if facts.is_new and curve.num_rows and curve["step"][0] <= 1 and curve["loss"][0] > _HIGHEST_INITIAL * facts.log_v:
        yield f"it was {curve['loss'][0]:.3g}, and ln({facts.vocab_size}) is {facts.log_v:.3g}: see --init_std"


def _mask(findings: Findings) -> Iterator[str]:
    change = findings.change
    if change.side == BELOW and change.loss < _LEAK * change.expected.loss:
        yield (f"the loss is {1 - change.loss / change.expected.loss:.0%} lower than expected: a token may see its "
               "label, or the data may repeat itself")


def _gradients(findings: Findings) -> Iterator[str]:
    curve = findings.curve
    yield from findings.hints("exploding_gradients", "vanishing_gradients")
    skipped, steps = np.nan_to_num(curve["skipped_steps"]), curve["step"]
    count = int(np.maximum(np.diff(skipped), 0).sum() + skipped[:1].sum())  # the number begins again at each resume
    if count > _SKIPPED * steps[-1]:
        yield f"{count} of {steps[-1]:.0f} updates were skipped"
    settled = curve.settled
    rates = settled["clip_rate"][-findings.change.rows:]
    if len(rates) and np.nanmean(rates) > _CLIPPED:
        norms, limit = settled["grad_norm"][-len(rates):], settled["clip_norm"][-1]
        yield (f"{np.nanmean(rates):.0%} of the steps were clipped: the median norm is {np.nanmedian(norms):.3g}, the "
               f"limit {limit:.3g}")


def _learning_rate(findings: Findings) -> Iterator[str]:
    facts, target = findings.facts, findings.target
    peak = facts.peak_lr or math.nan
    if target.peak_lr is not None and abs(peak - target.peak_lr) > _SAME_RATE * target.peak_lr:
        yield f"its peak is {peak:g}, and {target.peak_lr:g} in the run that the ladder predicts"
    for event in findings.events:
        if event["event"] == "override" and event.get("name") in ("lr", "schedule"):
            yield f"--override {event['name']} changed it at step {event['step']}"
    yield from findings.hints(*_RATE_HINTS)


CAUSES: tuple[tuple[str, Callable[[Findings], Iterator[str]]], ...] = (
    ("data", _data), ("labels", _labels), ("initial loss", _initial_loss), ("causal mask", _mask),
    ("gradients", _gradients), ("learning rate", _learning_rate))
"""names, in their order"""


class ReportCurve(Callback):
    """Compares each row with the curve, and reports changes with likely causes."""

    order = 55  # after the hints

    def __init__(self, expected: Target) -> None:
        self._expected = expected

    def start(self, run: Run) -> None:
        args = run.plan.args
        self._watch = CurveWatch(run.folder.path, self._expected, first_step=run.first_step, seq_length=args.seq_length,
                                 first_tokens=args.first_sample * args.seq_length) if run.world.rank == 0 else None

    def rolled_back(self, run: Run) -> None:
        if self._watch is not None:
            self._watch.return_to(run.step)

    def after_row(self, run: Run, row: Mapping[str, Any]) -> None:
        change = self._watch.observe(row) if self._watch is not None else None
        if change is None:
            return
        if change.event == ON_CURVE:
            run.screen.line(f"{change.event}: {change}")
            run.folder.event(ON_CURVE, reason=str(change), **change.record())
            return
        causes = self._causes(run, change)
        run.screen.line(f"{change.event}: {change}; likely causes, in the order of the sanity checks: "
                        f"{'; '.join(causes)}")
        run.folder.event(OFF_CURVE, reason=str(change), causes=causes, **change.record())

    def _causes(self, run: Run, change: Change) -> list[str]:
        """Return the likely causes of a loss that is off the curve."""
        log = CurveLog(run.folder.path, first_step=run.step)  # log of the rows that are written
        return likely_causes(Findings(change, log.curve(), log.facts(), self._expected, read_events(run.folder.path)))
