"""Results from hand-made records, and the choice of checkpoint and data position."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import ConfigError
from pretrain.extensions.replay.compare import compare, compare_loosely
from pretrain.extensions.replay.examine_step import Replay, examine
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.record_files import Header, RankRecord
from pretrain.extensions.replay.result import CAUSES, Result, find_cause
from pretrain.extensions.replay.target import Target, find_target, parse_target

FULL = ("weights", "states", "layers_forward", "layers_backward", "gradient_bits", "gradients", "reduced",
        "weights_after", "states_after")
Records = dict[int, RankRecord]


def row(step: int, rank: int) -> dict[str, Any]:
    layers = [step, rank, 1]
    return {"step": step, "samples": [step, step + 1], "tokens": rank, "lr": 0.1, "loss_scale": 1.0, "random": 5,
            "weights": layers, "states": {"exp_avg": 4, "master": 5}, "layers_forward": layers, "rank_loss": 2.0,
            "layers_backward": layers, "gradient_bits": layers, "gradients": [0.5, 0.5, 0.5], "loss": 2.0,
            "reduced": 9, "grad_norm": 1.0, "skipped": "", "weights_after": layers, "states_after": {"exp_avg": 4}}


def records(ranks: int = 2, pipe: int = 1) -> Records:
    return {rank: RankRecord(Header(rank, ranks, f"host{rank}", 1, 0, layers=["0", "1", "2"], coordinates={
        "data": rank // pipe, "pipeline": rank % pipe, "tensor": 0}), {step: row(step, rank) for step in range(1, 7)})
            for rank in range(ranks)}


def changed(found: Records, step: int, changes: dict[int, dict[str, Any]], *, later: bool = True) -> Records:
    """Return a copy with other values at a step; later steps differ everywhere, as in a run."""
    found = copy.deepcopy(found)
    for rank, values in changes.items():
        found[rank].rows[step].update(values)
    for record in found.values():
        for after in range(step + 1, 7) if later else ():
            record.rows[after].update(weights=[0, 0, 0], rank_loss=3.0, loss=3.0, grad_norm=4.0)
    return found


def result(run: Records, replays: list[Records] | None = None, **others: Any) -> Result:
    replays = replays or [records(len(run)), records(len(run))]
    between = [compare(replays[0], each, 1, 6) for each in replays[1:]]
    return find_cause(compare(run, replays[0], 1, 6, world_size=len(run)), between, **others)


BOTH = {"loss": 2.5, "grad_norm": 1.5}
CASES: dict[str, tuple[dict[int, dict[str, Any]], str, list[int], str | None]] = {
    "tokens": ({1: {"tokens": 7, "rank_loss": 2.1, **BOTH}, 0: BOTH}, "data_changed", [1], None),
    "lr": ({rank: {"lr": 0.3, "weights_after": [0, 0, 0]} for rank in (0, 1)}, "settings_changed", [0, 1], None),
    "random": ({0: {"random": 1, "rank_loss": 2.1}}, "random_state", [0], None),
    "weight": ({1: {"weights": [3, 1, 99], "layers_forward": [3, 1, 98], "rank_loss": 2.1, **BOTH}, 0: BOTH},
               "memory_weights", [1], "2"),
    "state": ({1: {"states": {"exp_avg": 8, "master": 5}, "states_after": {"exp_avg": 9}}}, "memory_states", [1], None),
    "forward": ({1: {"layers_forward": [3, 50, 51], "rank_loss": 2.1, **BOTH}, 0: BOTH}, "forward", [1], "1"),
    "backward": ({0: {"gradient_bits": [70, 71, 1], "layers_backward": [72, 0, 1], "grad_norm": 1.5},
                  1: {"grad_norm": 1.5}}, "backward", [0], "1"),
    "reduction": ({0: {"reduced": 8, "grad_norm": 1.5}, 1: {"grad_norm": 1.5}}, "reduction", [0], None),
    "update": ({1: {"states_after": {"exp_avg": 9}}}, "update", [1], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_names_stage_rank_and_layer(name: str) -> None:
    changes, kind, ranks, layer = CASES[name]
    found = result(changed(records(), 3, changes))
    assert (found.kind, found.certainty, found.step, found.ranks, found.layer) == (kind, "sure", 3, ranks, layer), found
    assert found.hosts == [f"host{rank}" for rank in ranks]
    assert found.remedy == CAUSES[kind].remedy


def without_checksums(found: Records, step: int) -> Records:
    for record in found.values():
        for key in FULL:
            record.rows[step].pop(key)
    return found


@pytest.mark.parametrize(("name", "also"), [("weight", "memory_weights"), ("forward", "memory_weights"),
                                            ("backward", "backward"), ("reduction", "backward")])
def test_a_step_without_checksums_makes_the_verdict_unsure(name: str, also: str) -> None:
    found = result(without_checksums(changed(records(), 3, CASES[name][0]), 3))
    assert found.certainty == "unsure"
    assert "no checksums" in found.reasons[0]
    assert also in (found.kind, *found.also)


def test_missing_steps_and_ranks_make_the_verdict_unsure() -> None:
    run = changed(records(), 3, CASES["weight"][0])
    for record in run.values():
        del record.rows[2]
    gap = result(run)
    assert (gap.kind, gap.certainty) == ("memory_weights", "unsure")
    assert any("2 to 2, cannot be compared" in reason for reason in gap.reasons)
    lost = changed(records(), 3, CASES["weight"][0])
    del lost[0]
    assert "no record of rank 0" in find_cause(compare(lost, records(), 1, 6, world_size=2)).reasons[0]
    assert find_cause(compare({}, records(), 1, 6, world_size=2)).certainty == "unsure"


def test_equal_records_are_reproducible_and_other_ranks_find_one_that_is_always_wrong() -> None:
    assert (result(records(), recomputed=()).kind, result(records(), recomputed=()).certainty) == ("reproducible",
                                                                                                     "sure")
    assert result(records()).also == ["wrong_rank"]  # no other rank has computed the micro-batches
    event = {"finding": "wrong", "ranks": [1], "step": 2, "layer": "layer 1 (Block)", "direction": "forward",
             "reason": "the majority"}
    found = result(records(), recomputed=[event])
    assert (found.kind, found.certainty, found.ranks, found.layer) == ("wrong_rank", "sure", [1], "1")
    assert result(records(), recomputed=[{**event, "finding": "undecided", "ranks": [0, 1]}]).certainty == "unsure"


def test_replays_that_differ_tell_a_flaky_rank_from_nondeterministic_kernels() -> None:
    run = changed(records(), 3, CASES["forward"][0])
    flaky = result(run, [records(), changed(records(), 2, {1: {"layers_forward": [2, 60, 61], "rank_loss": 2.2}})])
    assert (flaky.kind, flaky.now, flaky.ranks, flaky.step) == ("forward", True, [1], 2)
    everywhere = {rank: {"layers_forward": [2, rank, 61], "rank_loss": 2.2} for rank in (0, 1)}
    kernels = result(run, [records(), changed(records(), 2, everywhere)])
    assert (kernels.kind, kernels.layer) == ("nondeterministic", "2")


def test_a_replay_on_other_versions_or_once_is_unsure() -> None:
    run = changed(records(), 3, CASES["forward"][0])
    other = result(run, other_machine=["torch 2.13, recorded 2.12"])
    assert (other.kind, other.certainty) == ("forward", "unsure")
    assert "torch 2.13" in other.reasons[0]
    assert "once" in result(run, [records()]).reasons[0]


def test_a_difference_in_a_pipeline_begins_in_the_first_stage_that_has_it() -> None:
    run = changed(records(4, pipe=2), 3, {0: {"layers_forward": [3, 9, 9], "rank_loss": 2.1},
                                          1: {"layers_forward": [8, 9, 9], "rank_loss": 2.1}})
    found = find_cause(compare(run, records(4, pipe=2), 1, 6), [compare(records(4, pipe=2), records(4, pipe=2), 1, 6)])
    assert (found.ranks, found.pipeline_stage, found.layer) == ([0], 0, "1")
    # the loss of the last stage reaches the first one
    run = changed(records(4, pipe=2), 3, {2: {"rank_loss": 2.1}, 3: {"layers_forward": [3, 3, 9], "rank_loss": 2.1}})
    found = find_cause(compare(run, records(4, pipe=2), 1, 6), [compare(records(4, pipe=2), records(4, pipe=2), 1, 6)])
    assert (found.ranks, found.pipeline_stage, found.layer) == ([3], 1, "2")
    assert result(without_checksums(run, 3), [records(4, pipe=2)] * 2).ranks == [2, 3]


def test_the_first_operator_is_named_and_tells_the_ranks_of_a_tensor_parallel_group_apart() -> None:
    names = ("1.norm1", "1.attention.qkv", "1.mlp.up", "1.mlp.down", "2.mlp.up")
    healthy = records()
    for record in healthy.values():
        for each in record.rows.values():
            each["operators_forward"] = dict.fromkeys(names, 4)
    forward = {"layers_forward": [3, 8, 8], "rank_loss": 2.1}
    run = changed(healthy, 3, {rank: {**forward, "operators_forward": dict.fromkeys(names, 4) | dict.fromkeys(found, 5)}
                               for rank, found in enumerate((names[3:], names[2:]))})  # both get the sum of their parts
    found = result(run, [healthy] * 2)
    assert (found.kind, found.ranks, found.layer, found.operator) == ("forward", [1], "1", "1.mlp.up")
    inside = {1: {**forward, "operators_forward": dict.fromkeys(names, 4) | {"2.mlp.up": 5}}}
    assert result(changed(healthy, 3, inside), [healthy] * 2).operator is None  # the sum at the end of layer 1


def test_another_layout_is_compared_with_a_tolerance() -> None:
    near = changed(records(), 3, {0: {"loss": 2.00001, "grad_norm": 1.0001, "tokens": 77}}, later=False)
    assert compare_loosely(near, records(1), 1, 6, tolerance=2e-5).step is None
    far = changed(records(), 3, {0: {"loss": 2.001}}, later=False)
    assert compare_loosely(far, records(1), 1, 6, tolerance=2e-5).differing == {0: ["loss"]}


@pytest.mark.parametrize(("line", "kind"), [
    ("--train_data a: this is not the data that x was trained on (SHA-256 1 there, SHA-256 2 here)", "data_changed"),
    ("--seed 3: the checkpoint has 4", "")])
def test_a_replay_that_is_rejected_because_of_its_data_is_an_answer(line: str, kind: str, tmp_path: Path) -> None:
    def train(number: int, order: ReplayOrder) -> Replay:
        raise ConfigError.from_line(f"the replay was rejected: {line}")

    target = Target(tmp_path, 3, 0, {"flags": {}, "layout": {"world_size": 1}}, None, 0, None)
    if kind:
        assert examine(target, train, repeats=2).result.kind == kind
    else:
        with pytest.raises(ConfigError, match="--seed 3"):
            examine(target, train, repeats=2)


@pytest.mark.parametrize("text", ["run", "run@", "@5", "run@x", "run@0", "run@-1", "run@1.5", "run@" + "9" * 30])
def test_a_wrong_target_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="RUN@STEP"):
        parse_target(text)


def test_folders_without_a_run_or_the_step_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find_target(tmp_path / "none", 1)
    with pytest.raises(ConfigError, match=r"run\.json"):
        find_target(tmp_path, 1)
    (tmp_path / "run.json").write_text(json.dumps([{"first_step": 0, "flags": {}}]))
    with pytest.raises(ConfigError, match="recorded no step"):
        find_target(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "loss": 1.0}) + "\n")
    with pytest.raises(ConfigError, match="the steps 1 to 4"):
        find_target(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"run\.json: the record of the start is damaged"):
        find_target(tmp_path, 3)
