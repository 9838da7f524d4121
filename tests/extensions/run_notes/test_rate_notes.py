"""Notes about rates that hardly fit the length of a run."""

from typing import Any

import pytest

from pretrain.config.json_rates import Rate, json_schedule
from pretrain.config.schedule import KINDS, Schedule
from pretrain.extensions.run_notes.notes import length_note

PEAK = 2e-4


def flags(kind: str, **changes: Any) -> Rate:
    values: dict[str, Any] = {"kind": kind, "peak": PEAK, "min_ratio": KINDS[kind].min_ratio, "warmup_steps": 4,
                              "decay_steps": 400, "wsd_steps": 80 if kind == "wsd" else 0}
    return Schedule(**{**values, **changes})


def of_json(kind: str, **params: Any) -> Rate:
    return json_schedule(kind, {"warmup_num_steps": 4, **params}, optimizer_rate=PEAK)


CYCLE = {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}
NOTES = {
    "JSON, ends at 20": (of_json("WarmupDecayLR", total_num_steps=20), "value, 0, at step 22, and 378 of the 400"),
    "JSON, ends at 390": (of_json("WarmupDecayLR", total_num_steps=390), "lowest value, 0, at step 392, and 8 of"),
    "JSON, cosine": (of_json("WarmupCosineLR", total_num_steps=20), "lowest value, 2e-08, at step 21, and 379 of"),
    "JSON, one cycle": (json_schedule("OneCycle", {**CYCLE, "cycle_first_step_size": 50}, optimizer_rate=PEAK),
                        "lowest value, 1e-05, at step 10"),
    "JSON, long warm-up": (of_json("WarmupLR", warmup_num_steps=1000), "still rises when the run ends"),
    "JSON, late end": (of_json("WarmupDecayLR", total_num_steps=4000), "before the decay to 0"),
    "flags, early end": (flags("cosine", decay_steps=100), "lowest value, 2e-05, at step 100, and 300 of the 400"),
    "flags, at 0": (flags("linear", decay_steps=380, min_ratio=0.0), "lowest value, 0, at step 380, and 20 of"),
    "flags, wsd": (flags("wsd", decay_steps=200), "lowest value, 2e-05, at step 200, and 200 of"),
    "flags, late end": (flags("cosine", decay_steps=800), "the learning rate 0.00011"),
    "flags, one cycle": (flags("one_cycle", decay_steps=200, initial_ratio=0.04), "at step 200, and 200 of"),
    "no rate": (lambda done: 0.0, "the learning rate is 0 in all 400 steps"),
}
SILENT = {
    "JSON": of_json("WarmupDecayLR", total_num_steps=400), "JSON, warm-up": of_json("WarmupLR"),
    "JSON, cosine": of_json("WarmupCosineLR", total_num_steps=400), "GPT-3": flags("cosine", decay_steps=347),
    "steps": flags("step", milestones=(100, 200), milestone_factor=0.1),
    "wsd to continue": flags("wsd", decay_steps=800),
    "inverse_sqrt": flags("inverse_sqrt", min_ratio=0.2), **{kind: flags(kind, initial_ratio=0.04) for kind in KINDS},
    "one cycle": json_schedule("OneCycle", {**CYCLE, "cycle_first_step_size": 200}, optimizer_rate=PEAK),
}


@pytest.mark.parametrize("name", NOTES)
def test_rates_that_hardly_fit_the_run_are_noted(name: str) -> None:
    rate, text = NOTES[name]
    assert text in length_note(rate, 400)


@pytest.mark.parametrize("name", SILENT)
def test_usual_rates_are_not_noted(name: str) -> None:
    assert length_note(SILENT[name], 400) == ""


@pytest.mark.parametrize("steps", [1, 2, 3, 9, 4001, 10_000_000])
def test_every_length_of_a_run(steps: int) -> None:
    """The first step at the lowest rate is exact, although the rates of a few thousand steps are computed."""
    assert length_note(flags("linear", warmup_steps=1, decay_steps=steps), steps) == ""
    end = steps // 3 * 2
    note = length_note(flags("linear", warmup_steps=1, decay_steps=end), steps)
    assert (f"at step {end:,}, and {steps - end:,} of the {steps:,} steps" in note) == (steps > 8)
