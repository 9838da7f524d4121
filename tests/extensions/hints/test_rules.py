"""Hints about curves: each kind is found whatever the noise, the length and the log interval; healthy runs get none."""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.extensions.hints.extension import HintLog
from pretrain.extensions.hints.rules import RULES, find_hints
from pretrain.monitor import curve
from pretrain.monitor.curve import EVALUATION_KEYS, KEYS, Curve, Facts, Hint, Rows
from tests.support.launch import ROOT

SEEDS = range(25)


class Made:
    """A made curve of a run, healthy until a test changes it. All columns are arrays over the logged steps."""

    def __init__(self, seed: int) -> None:
        random = self.random = np.random.default_rng(seed)
        self.count, self.interval = int(random.integers(150, 900)), int(random.choice([1, 5, 10, 100]))
        self.noise, vocab = float(random.uniform(0.005, 0.05)), int(random.choice([258, 50257]))
        steps = np.arange(1, self.count + 1) * self.interval
        self.total = int(steps[-1])
        self.warmup, self.time = int(self.total * random.uniform(0.01, 0.05)) + 1, steps / self.total
        entropy = 0.62 * math.log(vocab)
        self.lowest = 0.3 * math.log(vocab)
        law = self.lowest * (1 + random.uniform(0.05, 0.12) * (self.time ** -random.uniform(0.2, 0.4) - 1))
        start = np.exp(-3 * steps / self.warmup)  # the first steps: from ln(V) to the law
        kind = str(random.choice(["cosine", "constant", "wsd"]))
        decay = {"cosine": 0.5 * (1 + np.cos(math.pi * self.time)), "constant": np.ones(self.count),
                 "wsd": np.minimum(1.0, (1 - self.time) / 0.2)}[kind]
        fraction = np.minimum(steps / self.warmup, 0.1 + 0.9 * decay if kind != "constant" else decay)
        law = np.minimum(law, entropy) - 0.02 * self.lowest * (1 - fraction) * (steps > self.warmup)
        self.mean = start * math.log(vocab) + (1 - start) * law  # loss without noise
        spread = np.exp(random.normal(0, 0.25, self.count))
        self.columns = {"step": steps, "seq_length": np.full(self.count, 1024), "consumed_samples": steps * 16,
                        "skipped_steps": np.zeros(self.count), "lr": 1e-3 * fraction,
                        "grad_norm": spread * (0.4 + 4 * start), "clip_norm": np.ones(self.count),
                        "update_ratio": 4e-3 * fraction,
                        "step_time_ms": 100 * np.exp(random.normal(0, 0.02, self.count)),
                        "data_time_ms": np.full(self.count, 0.1), "forward_time_ms": np.full(self.count, 30.0),
                        "backward_time_ms": np.full(self.count, 60.0), "mfu_exact": np.full(self.count, 0.4)}
        self.schedule = {"kind": kind, "peak": 1e-3, "decay_steps": self.total, "min_ratio": 0.1}
        self.gap = np.full(self.count, 0.01 * self.lowest)  # validation loss above the training loss
        self.facts = Facts(self.total, vocab, entropy, 32 * self.total, self.schedule, 1e-3, is_new=True, has_adam=True,
                           eval_steps=10, blocks=24.0)

    def hints(self, until: float = 1.0) -> list[str]:
        """Return the names of the hints of the first rows, this fraction of all."""
        return [hint.name for hint in self.all_hints(until)]

    def all_hints(self, until: float = 1.0) -> list[Hint]:
        rows = Rows(KEYS)
        evaluations = Rows(EVALUATION_KEYS)
        loss = self.mean + self.noise * self.random.normal(size=self.count)
        gradients = self.columns["grad_norm"]
        columns = {**self.columns, "loss": loss, "clip_rate": (gradients > self.columns["clip_norm"]).astype(float)}
        last = max(int(until * self.count), 1)
        for number in range(last):
            rows.append({key: float(column[number]) for key, column in columns.items()})
            if (number + 1) % (self.count // 10) == 0:
                value = self.mean[number] + self.gap[number] + self.noise * self.random.normal() / math.sqrt(10)
                evaluations.append({"step": float(columns["step"][number]), "eval_loss": value})
        return find_hints(Curve(rows.columns(), evaluations.columns()), self.facts)


def _no_learning(made: Made) -> None:
    made.mean = np.maximum(made.mean, made.facts.unigram_entropy or 0.0)


def _plateau(made: Made) -> None:
    made.columns["lr"] = np.minimum(made.columns["step"] / made.warmup, 1) * 1e-3
    made.facts = replace(made.facts, schedule={**made.schedule, "kind": "constant"})
    flat = made.time > 0.4
    made.mean = np.where(flat, made.mean[~flat][-1], made.mean + 0.5 * (1 - made.time / 0.4))


def _oscillation(made: Made) -> None:
    made.mean = made.mean + (1.5 * made.noise + 0.02 * made.lowest) * np.sin(
        2 * math.pi * made.time * made.random.uniform(8, 20))


def _divergence(made: Made) -> None:
    late = np.maximum(made.time - 0.5, 0)
    made.mean = made.mean + (0.4 * made.lowest + 6 * made.noise) * late ** 1.5


def _blow_up(made: Made) -> None:
    made.mean = np.where(made.time > 0.7, made.facts.log_v + 1.0, made.mean)


def _rate_too_high(made: Made) -> None:
    made.columns["update_ratio"] = 8 * made.columns["update_ratio"]
    made.mean = np.maximum(made.mean, 0.9 * (made.facts.unigram_entropy or 0))
    made.columns["lr"] = np.minimum(made.columns["step"] / made.warmup, 1) * 1e-3
    made.columns["update_ratio"] = 40 * made.columns["lr"]


def _rate_too_low(made: Made) -> None:
    made.columns["update_ratio"] = made.columns["update_ratio"] * 5 / made.total
    made.mean = made.facts.log_v - 0.3 * made.time


def _no_update(made: Made) -> None:
    made.columns["update_ratio"] = made.columns["update_ratio"] * 1e-4
    made.mean = np.full(made.count, made.facts.log_v)


def _clipping(made: Made) -> None:
    made.columns["clip_norm"] = np.full(made.count, 0.01)


def _exploding(made: Made) -> None:
    made.columns["grad_norm"] = made.columns["grad_norm"] * np.exp(4 * made.time)


def _vanishing(made: Made) -> None:
    made.columns["grad_norm"] = made.columns["grad_norm"] * np.exp(-9 * made.time)


def _gap(made: Made) -> None:
    made.gap = 0.5 * (made.facts.log_v - made.mean)


def _overfit(made: Made) -> None:
    """The validation loss rises from the middle of the run on, while the training loss falls."""
    made.facts = replace(made.facts, samples_per_epoch=made.total)
    made.gap = made.gap + (0.3 * made.lowest + 8 * made.noise) * np.maximum(made.time - 0.5, 0)


def _rising_validation(made: Made) -> None:
    _overfit(made)
    made.facts = replace(made.facts, samples_per_epoch=32 * made.total)


def _memorized(made: Made) -> None:
    made.mean = np.where(made.time > 0.5, 0.01, made.mean)
    made.noise = 0.001


def _data_bound(made: Made) -> None:
    made.columns["data_time_ms"] = made.columns["step_time_ms"] * made.random.uniform(0.15, 0.6, made.count)


def _launch_bound(made: Made) -> None:
    for key in ("step_time_ms", "forward_time_ms", "backward_time_ms"):
        made.columns[key] = made.columns[key] / 10
    made.columns["data_time_ms"] = made.columns["data_time_ms"] / 10
    made.columns["mfu_exact"] = np.full(made.count, 0.04)


def _ended_schedule(made: Made) -> None:
    made.facts = replace(made.facts, schedule={**made.schedule, "kind": "cosine", "decay_steps": int(0.5 * made.total)})
    made.columns["lr"] = 1e-3 * np.minimum(made.columns["step"] / made.warmup, np.maximum(1 - 1.8 * made.time, 0.1))


def _ended_json_schedule(made: Made) -> None:
    _ended_schedule(made)
    made.facts = replace(made.facts, schedule=None)


def _unfinished_schedule(made: Made) -> None:
    made.facts = replace(made.facts, schedule={**made.schedule, "kind": "linear", "decay_steps": 2 * made.total})
    made.columns["lr"] = 1e-3 * np.minimum(made.columns["step"] / made.warmup, 1 - 0.45 * made.time)


# kind of hint that is found, and kinds that the curve has as well
PLANTED: dict[Callable[[Made], None], tuple[str, set[str]]] = {
    _no_learning: ("no_learning", set()), _plateau: ("plateau", set()), _oscillation: ("oscillation", set()),
    _divergence: ("divergence", set()), _blow_up: ("divergence", set()), _rate_too_high: ("rate_too_high", set()),
    _rate_too_low: ("rate_too_low", set()), _no_update: ("rate_too_low", set()), _clipping: ("clipping", set()),
    _exploding: ("exploding_gradients", {"clipping"}), _vanishing: ("vanishing_gradients", set()),
    _gap: ("gap", set()), _overfit: ("repeated_data", set()), _rising_validation: ("gap", set()),
    _memorized: ("repeated_data", {"gap"}), _data_bound: ("data_bound", set()),
    _launch_bound: ("launch_bound", set()), _ended_schedule: ("schedule", set()),
    _ended_json_schedule: ("schedule", set()), _unfinished_schedule: ("schedule", set()),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.lstrip("_"))
def test_each_kind_is_found(plant: Callable[[Made], None]) -> None:
    expected, implied = PLANTED[plant]
    for seed in SEEDS:
        made = Made(seed)
        plant(made)
        found = made.hints()
        assert expected in found, (seed, found)
        assert set(found) <= {expected} | implied, (seed, found)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.lstrip("_"))
def test_a_hint_has_the_numbers_behind_it_and_a_remedy(plant: Callable[[Made], None]) -> None:
    made = Made(0)
    plant(made)
    for hint in made.all_hints():
        assert any(letter.isdigit() for letter in hint.text), hint
        assert "nan" not in hint.text.split(), hint
        assert hint.remedy, hint


def test_there_are_never_more_than_three_hints() -> None:
    """Of four independent faults, the most important three."""
    order = [rule.name for rule in RULES]
    for seed in SEEDS:
        made = Made(seed)
        for plant in (_clipping, _data_bound, _gap, _ended_schedule):
            plant(made)
        found = made.hints()
        assert len(found) == 3, (seed, found)
        assert found == sorted(found, key=order.index), seed
        assert set(found) <= {"gap", "schedule", "clipping", "data_bound"}, (seed, found)


def test_all_kinds_are_planted() -> None:
    assert {name for name, _ in PLANTED.values()} == {rule.name for rule in RULES}


def test_healthy_curves_get_no_hint() -> None:
    """Not at any time while they grow."""
    for seed in range(60):
        made = Made(seed)
        for until in (0.02, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0):
            assert made.hints(until) == [], (seed, until)


# Runs on one CPU: the recipes shakespeare-char, wsd and layouts, two ladders of Llama models (on Python's library, and
# on Debian's linux-doc), and eight runs of the recipe wsd with a fault, such as 30 times the learning rate.
RUNS: list[dict[str, Any]] = json.loads(gzip.decompress(
    (ROOT / "tests/support/curves_of_runs.json.gz").read_bytes()))


def _rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows in the order in which the run wrote them."""
    training, evaluations = (
        [dict(zip(run[part], values, strict=True)) for values in zip(*run[part].values(), strict=True)]
        for part in ("rows", "evaluations"))
    rows = [*training, *({**row, "split": "valid"} for row in evaluations)]
    return sorted(rows, key=lambda row: row["step"])


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_hints_of_real_runs(run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run trains, and when it is resumed: a healthy one gets no hint, a fault its own, once."""
    monkeypatch.setattr(Facts, "of_record", lambda _: Facts(**run["facts"]))
    monkeypatch.setattr(curve, "newest_start", lambda _: {})
    log, found = HintLog(tmp_path, first_step=0), []
    rows = _rows(run)
    for number, row in enumerate(rows):
        if number == len(rows) // 2:
            (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows[:number]))
            (tmp_path / "events.jsonl").write_text("".join(
                json.dumps({"event": "hint", "step": 1, "name": name}) + "\n" for name in found))
            log = HintLog(tmp_path, first_step=rows[number - 1]["step"])
        found += [hint.name for hint in log.observe(row)]
    assert len(found) == len(set(found))
    assert set(run["expected"]) <= set(found) <= {*run["expected"], *(["divergence"] if run["expected"] else [])}


def test_there_are_twenty_healthy_runs() -> None:
    assert sum(not run["expected"] for run in RUNS) >= 20
