"""The expected curve: healthy losses are never named, planted faults are, within a number of rows; resumes, causes."""

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.extensions.ladder.curve_watch import ABOVE, BELOW, FEWEST_ROWS, Change, CurveWatch
from pretrain.extensions.ladder.expected_curve import (
    OFF_CURVE,
    ON_CURVE,
    CurvePoint,
    Target,
    target_of_record,
    target_record,
)
from pretrain.extensions.ladder.report_curve import CAUSES, Findings, likely_causes
from pretrain.monitor.curve import EVALUATION_KEYS, KEYS, Curve, Facts, Rows
from tests.support.launch import ROOT

TOKENS = 8192  # tokens of a step
SEQ_LENGTH = 64
DEVIATIONS = 1.645  # half-width of an interval that holds 90%


class Simulated:
    """A run whose loss follows its expected curve, with autocorrelated noise; a row for every 10th step."""

    def __init__(self, seed: int, *, deviation: float | None = None, count: int | None = None,
                 width: float | None = None) -> None:
        """`deviation` of the run from the expected curve, in standard deviations of the prediction; None: random."""
        random = self.random = np.random.default_rng(seed)
        self.count = int(random.integers(100, 500)) if count is None else count
        self.steps = 10 * np.arange(1, self.count + 1)
        # standard deviation of the prediction, of the log of the loss
        self.width = float(random.uniform(0.003, 0.02)) if width is None else width
        law = 1.5 + random.uniform(2, 4) * (self.steps / 10) ** -random.uniform(0.2, 0.5)
        ends = (math.exp(sign * DEVIATIONS * self.width) for sign in (0, -1, 1))
        factors, self.law = list(ends), law
        self.warmup = max(self.count // 50, 1)
        points = np.unique(np.geomspace(self.warmup, self.count, 40).astype(int)) - 1
        curve = [CurvePoint(float(self.steps[at] * TOKENS), *(float(law[at] * factor) for factor in factors))
                 for at in points]
        end = curve[-1]
        self.target = Target(1e6, end.tokens, TOKENS, end.loss, end.low, end.high, curve, peak_lr=1e-3)
        self.noise, correlation = float(random.choice([0.01, 0.05, 0.15])), float(random.choice([0.0, 0.3, 0.6]))
        self.deviation = random.normal() if deviation is None else deviation
        self.losses = law * math.exp(self.deviation * self.width) + self.noise * autocorrelated(random, self.count,
                                                                                               correlation)
        self.entropy = float(law[self.warmup] + 0.2)

    def rows(self, first: int = 0) -> list[dict[str, Any]]:
        return [{"step": int(step), "consumed_tokens": int(step * TOKENS), "loss": float(loss),
                 "seq_length": SEQ_LENGTH}
                for step, loss in zip(self.steps[first:], self.losses[first:], strict=True)]

    def watch(self, run: Path, *, first_step: int = 0) -> CurveWatch:
        return CurveWatch(run, self.target, first_step=first_step, first_tokens=0, seq_length=SEQ_LENGTH)

    def changes(self) -> list[Change]:
        return observe(self.watch(Path("none")), self.rows())


def autocorrelated(random: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return an AR(1) process of variance 1."""
    values = random.normal(size=count)
    for number in range(1, count):
        values[number] = correlation * values[number - 1] + math.sqrt(1 - correlation**2) * values[number]
    return values


def observe(watch: CurveWatch, rows: Iterable[dict[str, Any]]) -> list[Change]:
    return [change for row in rows if (change := watch.observe(row)) is not None]


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_healthy_run_is_not_named(evaluated: bool) -> None:
    """The losses without noise lie in the interval: of 200 runs, none gets an event.

    With evaluations, the validation texts are 4% harder or easier than the training texts.
    """
    wrong = []
    for seed in range(100):
        deviation = np.random.default_rng(seed).uniform(-DEVIATIONS, DEVIATIONS)
        run = Simulated(seed + 100 * evaluated, deviation=deviation)
        rows = run.rows()
        if evaluated:
            rows = with_evaluations(run, 0.04 if seed % 2 else -0.04)
        wrong += [(seed, deviation, change) for change in observe(run.watch(Path("none")), rows)]
    assert wrong == []


def with_evaluations(run: Simulated, harder: float) -> list[dict[str, Any]]:
    """Return rows with an evaluation after every 20th one; its loss is as predicted, the training loss is not."""
    rows, every = [], 20
    for number, row in enumerate(run.rows(), 1):
        rows.append({**row, "loss": row["loss"] - harder * run.law[number - 1]})
        if number % every == 0:
            loss = run.law[number - 1] * math.exp(run.deviation * run.width) + 0.3 * run.noise * run.random.normal()
            rows.append({"step": row["step"], "split": "valid", "eval_loss": loss})
    return rows


def test_evaluations_show_smaller_departures() -> None:
    """After 12 evaluations, a loss of training and validation that is 6% higher is named, if the noise permits it."""
    runs = [Simulated(seed, deviation=0.0, count=400, width=0.003) for seed in range(10)]
    for run in (run for run in runs if run.noise < 0.1):
        assert observe(run.watch(Path("none")), with_evaluations(run, 0.04)) == []
        run.losses[250:] *= 1.06
        run.law[250:] *= 1.06
        found = observe(run.watch(Path("none")), with_evaluations(run, 0.04))
        assert [(change.event, change.side) for change in found] == [(OFF_CURVE, ABOVE)]
        assert found[0].loss == pytest.approx(run.law[found[0].step // 10 - 1], rel=0.04)


@pytest.mark.slow
def test_a_long_healthy_run_is_not_named() -> None:
    for seed in range(100):
        deviation = np.random.default_rng(seed).uniform(-DEVIATIONS, DEVIATIONS)
        assert Simulated(seed, deviation=deviation, count=5000).changes() == [], seed


@pytest.mark.slow
def test_one_in_a_hundred_predicted_runs_is_named() -> None:
    """Runs as far from the curve as its prediction says: 1% lie outside of the wider band."""
    named = sum(bool(Simulated(seed).changes()) for seed in range(2000))
    assert named <= 30  # 1% of the predictions are farther away, and 1 in 200 for the noise


def _shuffled_labels(run: Simulated, at: int) -> None:
    """No more than token frequencies is learned."""
    run.losses = np.maximum(run.losses, run.entropy)


def _ten_times_the_rate(run: Simulated, at: int) -> None:
    """The loss is 0.5 nats higher, and noisier."""
    run.losses = run.losses + 0.5 + run.noise * run.random.normal(size=run.count)


def _other_data(run: Simulated, at: int) -> None:
    run.losses[at:] += 0.4


def _repeated_data(run: Simulated, at: int) -> None:
    """From the second epoch on, the model repeats what it has seen."""
    run.losses[at:] -= 1.5 * (np.arange(run.count - at) / run.count)


FAULTS = {  # fault -> (side, whether it begins at row `at`, most rows until it is named)
    _shuffled_labels: (ABOVE, False, 96), _ten_times_the_rate: (ABOVE, False, 64), _other_data: (ABOVE, True, 64),
    _repeated_data: (BELOW, True, 160)}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.lstrip("_"))
def test_planted_faults_are_named_soon(fault: Any) -> None:
    side, begins, most = FAULTS[fault]
    for seed in range(25):
        run = Simulated(seed, deviation=float(np.random.default_rng(seed).uniform(-1, 1)))
        at = run.count // 2 if begins else run.warmup
        if run.count - at < most:
            continue
        fault(run, at)
        changes = run.changes()
        assert changes, seed
        assert (changes[0].event, changes[0].side) == (OFF_CURVE, side), seed
        rows = (changes[0].step - run.steps[at]) // 10
        assert 0 < rows <= most, (seed, rows)
        assert len(changes) == 1, seed


# recorded runs of one small model on tiny Shakespeare; those with faults have a row for every 5th step
RECORDED = {run["name"]: run for run in json.loads(gzip.decompress(
    (ROOT / "tests/support/curves_of_runs.json.gz").read_bytes()))}


def recorded_rows(name: str) -> list[dict[str, Any]]:
    rows = RECORDED[name]["rows"]
    return [{"step": step, "consumed_tokens": samples * SEQ_LENGTH, "loss": loss, "seq_length": SEQ_LENGTH}
            for step, samples, loss in zip(rows["step"], rows["consumed_samples"], rows["loss"], strict=True)]


def curve_of(rows: list[dict[str, Any]], *, width: float) -> Target:
    """Return the smoothed curve of a run from its 6th row on, with an interval of this relative half-width."""
    tokens, losses = (np.array([row[key] for row in rows]) for key in ("consumed_tokens", "loss"))
    smoothed = np.polynomial.Polynomial.fit(np.log(tokens[5:]), losses[5:], 7)
    curve = [CurvePoint(float(at), loss, (1 - width) * loss, (1 + width) * loss)
             for at in np.geomspace(tokens[5], tokens[-1], 60) for loss in (float(smoothed(math.log(at))),)]
    return Target(1e6, curve[-1].tokens, TOKENS, curve[-1].loss, curve[-1].low, curve[-1].high, curve)


@pytest.mark.parametrize("name", [name for name, run in RECORDED.items()
                                  if not run["expected"] and len(run["rows"]["step"]) > 50])
def test_the_noise_of_real_runs(name: str) -> None:
    """The curve of the run itself, also with a narrow interval, which the run is 0.5% above."""
    rows = recorded_rows(name)
    for width, factor in ((0.02, 1.0), (0.005, 1.0), (0.005, 1.005)):
        watch = CurveWatch(Path("none"), curve_of(rows, width=width), first_step=0, first_tokens=0,
                           seq_length=SEQ_LENGTH)
        assert observe(watch, ({**row, "loss": factor * row["loss"]} for row in rows)) == []


@pytest.mark.parametrize(("name", "side", "rows"), [
    ("faulty/lr30", ABOVE, 32), ("faulty/lr100", ABOVE, 32), ("faulty/lr01", ABOVE, 32), ("faulty/lr001", ABOVE, 32),
    ("faulty/repeated", BELOW, 104)])
def test_faults_of_real_runs(name: str, side: str, rows: int) -> None:
    """30 and 100 times the learning rate, a tenth and a hundredth of it; a text that is read 58 times."""
    watch = CurveWatch(Path("none"), curve_of(recorded_rows("wsd/wsd"), width=0.02), first_step=0, first_tokens=0,
                       seq_length=SEQ_LENGTH)
    changes = observe(watch, recorded_rows(name))
    assert [(change.event, change.side) for change in changes] == [(OFF_CURVE, side)]
    assert changes[0].step <= 5 * rows


def test_spikes_are_not_named() -> None:
    for seed in range(20):
        run = Simulated(seed, deviation=0.0)
        for at in np.linspace(run.warmup + 10, run.count - 10, 4).astype(int):
            run.losses[at:at + 4] += [3.0, 2.0, 1.0, 0.5]
        run.losses[run.count // 2] = math.nan
        assert run.changes() == [], seed


def test_a_return_is_named_and_there_is_no_flood() -> None:
    for seed in range(10):
        run = Simulated(seed, deviation=0.0)
        first, last = run.count // 3, run.count // 3 + 60
        run.losses[first:last] += 1.0
        changes = run.changes()
        assert [change.event for change in changes] == [OFF_CURVE, ON_CURVE], seed
        assert changes[0].since == pytest.approx(run.steps[first], abs=10 * FEWEST_ROWS)
        assert changes[1].step > run.steps[last]
    run = Simulated(3, deviation=2.0)  # between the interval and the wider band
    run.losses = run.losses + 0.05 * np.sin(np.arange(run.count) / 8)
    assert len(run.changes()) <= 2 * math.log2(run.count / FEWEST_ROWS)


def write_events(run: Path, changes: list[Change]) -> None:
    with open(run / "events.jsonl", "a") as file:
        for change in changes:
            file.write(json.dumps({"event": change.event, "step": change.step, "side": change.side,
                                   "rows": change.rows}) + "\n")


def test_steps_that_are_trained_again_give_no_second_event(tmp_path: Path) -> None:
    """A run leaves the curve and returns; it is killed at each row, and resumed 30 rows before."""
    run = Simulated(0, deviation=0.0)
    first = run.count // 3
    run.losses[first:first + 60] += 1.0
    rows, reference = run.rows(), run.changes()
    assert [change.event for change in reference] == [OFF_CURVE, ON_CURVE]
    for killed in range(first - 10, first + 100, 7):
        folder = tmp_path / str(killed)
        folder.mkdir()
        found = observe(run.watch(folder), rows[:killed])
        write_events(folder, found)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:killed]))
        resumed = max(killed - 30, 1)
        watch = run.watch(folder, first_step=rows[resumed - 1]["step"])
        found += observe(watch, rows[resumed:])
        assert [change.event for change in found] == [OFF_CURVE, ON_CURVE], killed
        assert [change.step for change in found] == [change.step for change in reference], killed


def test_a_rollback_to_before_the_fault_ends_it() -> None:
    """The steps are trained again without the fault: the return is reported when they are past."""
    run = Simulated(1, deviation=0.0)
    at = run.count // 2
    healthy = run.rows()
    run.losses[at:] += 1.0
    faulty, watch = run.rows(), run.watch(Path("none"))
    found = observe(watch, faulty[:at + 30])
    assert [change.event for change in found] == [OFF_CURVE]
    watch.return_to(int(run.steps[at - 20]))
    again = observe(watch, healthy[at - 19:])
    assert [(change.event, change.step) for change in again] == [(ON_CURVE, healthy[at + 30]["step"])]
    # and with the fault: nothing more is reported
    watch = run.watch(Path("none"))
    observe(watch, faulty[:at + 30])
    watch.return_to(int(run.steps[at - 20]))
    assert observe(watch, faulty[at - 19:]) == []


def test_a_damaged_event_does_not_count(tmp_path: Path) -> None:
    run = Simulated(2, deviation=0.0)
    (tmp_path / "events.jsonl").write_text('{"event": "off_curve", "step": 20, "side": 1}\n'
                                           '{"event": "off_curve", "step": 30, "side": "above", "rows": -1}\n')
    changes = observe(run.watch(tmp_path, first_step=100), run.rows(10))
    assert [change.event for change in changes] == [ON_CURVE]


def test_rows_that_are_not_compared(tmp_path: Path) -> None:
    """Shorter sequences, rows before and after the curve, and broken ones."""
    run = Simulated(2, deviation=0.0)
    watch = run.watch(tmp_path)
    for row in run.rows():
        for change in ({"seq_length": 32}, {"loss": None}, {"loss": 10**400}, {"loss": math.inf},
                       {"consumed_tokens": 1}, {"consumed_tokens": 1e15},
                       {"consumed_tokens": None}):
            assert watch.observe({**row, "loss": 99.0, **change}) is None
    assert watch.observe({"step": 1, "split": "valid", "eval_loss": 99.0}) is None


def test_the_record_of_a_target() -> None:
    target = Simulated(0).target
    record = json.loads(json.dumps(target_record(target)))
    assert target_of_record(record) == target
    for damaged in ({}, {**record, "curve": [[1, 2]]}, {**record, "curve": None}, {**record, "tokens": "x"},
                    {**record, "curve": record["curve"][::-1]}, {**record, "curve": [[10**400] * 4] * 2}):
        assert target_of_record(damaged) is None


def findings(run: Simulated, columns: dict[str, Any], *, facts: Facts, events: Any = (), **change: Any) -> Findings:
    rows = Rows(KEYS)
    for number, row in enumerate(run.rows()):
        rows.append({**row, "consumed_samples": row["consumed_tokens"] // SEQ_LENGTH, "lr": 1e-3, "skipped_steps": 0,
                     "grad_norm": 0.5, "clip_norm": 1.0, "clip_rate": 0.0, "update_ratio": 3e-3,
                     **{key: float(column[number]) for key, column in columns.items()}})
    (found,) = run.changes()
    return Findings(replace(found, **change), Curve(rows.columns(), Rows(EVALUATION_KEYS).columns()), facts,
                    run.target, events)


def test_causes_are_named_in_their_order() -> None:
    run = Simulated(0, deviation=0.0)
    _shuffled_labels(run, 0)
    facts = Facts(vocab_size=258, unigram_entropy=run.entropy, peak_lr=1e-2, is_new=True, has_adam=True)
    ones = np.ones(run.count)
    run.losses[0] = 12.0
    found = likely_causes(findings(
        run, {"step": np.where(run.steps == 10, 1, run.steps), "clip_rate": ones,
              "grad_norm": 7 * ones, "skipped_steps": np.arange(run.count)}, facts=facts,
        events=[{"event": "data_changed", "step": 7}, {"event": "override", "name": "lr", "step": 9},
                {"event": "save", "step": 9}]))
    names = [text.split(":")[0] for text in found]
    assert names == ["data", "labels", "initial loss", "gradients", "gradients", "learning rate", "learning rate"]
    text = "\n".join(found)
    for part in ("data_changed at step 7", "near the unigram entropy", "it was 12", "updates were skipped",
                 "100% of the steps were clipped: the median norm is 7, the limit 1",
                 "its peak is 0.01, and 0.001 in the run that the ladder predicts",
                 "--override lr changed it at step 9"):
        assert part in text
    order = [name for name, _ in CAUSES]
    assert sorted(names, key=order.index) == names


def test_causes_of_a_low_loss_of_a_jump_and_of_nothing() -> None:
    run = Simulated(4, deviation=0.0)
    run.losses = 0.6 * run.losses
    found = likely_causes(findings(run, {}, facts=Facts(samples_per_epoch=1000)))
    assert [text.split(":")[0] for text in found] == ["data", "causal mask"]
    assert "times, and the model repeats what it has seen" in found[0]
    for seed in (0, 4):  # in the noise of the second one, nothing is certain
        run = Simulated(seed, deviation=0.0)
        _other_data(run, run.count // 2)
        found = likely_causes(findings(run, {}, facts=Facts()))
        assert found[0].startswith("nothing in the metrics explains it" if seed == 4 else
                                   "data: the loss jumped by +0.")
