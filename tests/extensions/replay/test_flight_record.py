"""The flight recorder on real engines: it changes nothing, two runs have equal rows, and a planted fault shows first in
the stage and on the rank that it belongs to.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from pretrain.extensions.replay.compare import DIGEST, UNCOMPARED, differing_keys, stage_of
from pretrain.extensions.replay.record_files import RankRecord, kept_folder, read_start, start_folder
from pretrain.monitor.read_run_folder import read_events, read_metrics
from tests.conftest import selected_params
from tests.extensions.replay import WORKERS
from tests.support.cases import CPU, DROPOUT, case, config, flags
from tests.support.launch import run_ranks, run_worker
from tests.support.wrapped_models import ARE_WRAPPED, WRAPPED_MODELS

SAVED, PLANTED, STEPS = 3, 5, 6
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
# name -> (number of ranks, DeepSpeed JSON, flags, samples a step, name of a block on the last rank)
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int, str]] = {
    "zero1": (2, config(1, precision="bf16"), {}, 16, "2"),
    "pipeline_data": (4, config(1, precision="bf16", stages=2, accumulation=4, checkpoint_every=1),
                      {"overrides": DROPOUT}, 32, "3"),
    "zero3_offload": (2, config(3, precision="bf16", offload_optimizer=CPU, param_persistence_threshold=0),
                      {"overrides": DROPOUT}, 16, "2"),
    "tensor_data": (4, {**config(0), **TENSOR}, {}, 16, "2"),
}
_EXPERTS = {"model_type": "mixtral", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "max_position_embeddings": 128}
# layouts without planted faults: name -> (number of ranks, DeepSpeed JSON, flags; "values": a config.json)
OTHERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero0_bf16": (2, config(0, precision="bf16"), {}), "zero2": (2, config(2), {}),
    "zero2_offload": (2, config(2, precision="bf16", offload_optimizer=CPU), {}),
    "zero3_offload_param": (2, config(3, offload_optimizer=CPU, offload_param=CPU), {}),
    "sequence": (2, {**config(2, precision="bf16"), "sequence_parallel_size": 2}, {"overrides": DROPOUT}),
    "experts": (2, {**config(2, precision="bf16"), "expert_parallel": {"enabled": True, "autoep_size": 2}},
                {"values": _EXPERTS}),
    "wrapped": (2, config(3), {"values": WRAPPED_MODELS["gemma4_text"]}),
    "wrapped_pipeline": (2, config(1, stages=2), {"values": WRAPPED_MODELS["deepseek_v3"]}),
    "compiled": (2, config(3, checkpoint_every=1), {"compile_blocks": True}),
    "recomputed": (2, config(2), {"overrides": DROPOUT, "recompute": "mlp"}),
}
# kind -> (values of the plant, stage in which it shows first)
PLANTS: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({}, "data"),
    "lr": ({"value": 1.001}, "settings"),
    "random": ({}, "random"),
    "weight": ({"name": "mlp.up.weight", "bit": 3}, "weights"),
    "state": ({"name": "exp_avg", "bit": 0}, "weights"),
    "master": ({"kind": "state", "name": "master", "bit": 0}, "weights"),
    "operator": ({}, "forward"),
    "gradient": ({"name": "mlp.up.weight", "bit": 2}, "backward"),
    "reduced": ({"bit": 0}, "reduction"),
}
FAST = [("zero1", plant) for plant in PLANTS] + [("pipeline_data", plant) for plant in ("weight", "operator")]
PLANTED_CASES = [pytest.param(layout, plant, marks=() if (layout, plant) in FAST else pytest.mark.slow)
                 for layout in LAYOUTS for plant in PLANTS if (layout, plant) != ("tensor_data", "master")]
ALL_LAYOUTS = [pytest.param(layout, marks=() if layout in ("zero1", "pipeline_data") else pytest.mark.slow)
               for layout in [*LAYOUTS, *OTHERS] if ARE_WRAPPED or not layout.startswith("wrapped")]


def run_flags(corpus: str, **more: Any) -> dict[str, Any]:
    """Return flags without a watcher, whose process would only cost time."""
    return flags(corpus, layers=2, steps=STEPS, flight_interval=1, log_interval=1, save_interval=SAVED,
                 step_timeout=0, first_step_timeout=0, max_bad_steps=1, **more)


def plant_case(layout: str, name: str, corpus: str) -> dict[str, Any]:
    """Return the case of a plant on the last rank, after the checkpoint of the run without one."""
    ranks, values, more, samples, block = LAYOUTS[layout]
    given = PLANTS[name][0]
    if "name" in given and name in ("weight", "gradient"):
        given = {**given, "name": f"{block}.{given['name']}"}
    plant = {"kind": name, "rank": ranks - 1, "step": PLANTED, "consumed_samples": samples * (PLANTED - 1),
             **({"name": block} if name == "operator" else {}), **given}
    return case(f"{layout}-{name}", "", values, run_flags(corpus, **more), after=f"{layout}-saved", plant=plant)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run name -> (result, folder). All cases of one number of ranks share a launch."""
    folder = tmp_path_factory.mktemp("flight")
    layouts, planted = selected_params(request, "layout"), selected_params(request, "layout", "plant")
    cases: dict[int, list[dict[str, Any]]] = {}
    for layout in layouts:
        ranks, values, more = (LAYOUTS[layout] if layout in LAYOUTS else OTHERS[layout])[:3]
        usual = run_flags(corpus, **{key: value for key, value in more.items() if key != "values"})
        if "values" in more:
            path = folder / f"{layout}.json"
            path.write_text(json.dumps(more["values"]))
            usual |= {"model": str(path), "model_overrides": "vocab_size=256"}
        off = {**{key: value for key, value in usual.items() if key != "flight_interval"}, "flight_steps": 0}
        cases.setdefault(ranks, []).extend([
            case(f"{layout}-off", "", values, off), case(f"{layout}-on", "", values, usual),
            case(f"{layout}-saved", "", values, {**usual, "exit_step": SAVED}),
            case(f"{layout}-resumed", "", values, usual, after=f"{layout}-saved"),
            case(f"{layout}-compared", "", values, {**usual, "recompute_interval": 1}),
            *(plant_case(layout, plant, corpus) for other, plant in planted if other == layout)])
    found: dict[str, Any] = {}
    for ranks, each in cases.items():
        for name, result in run_worker(str(WORKERS / "plant_worker.py"), each, ranks, folder / str(ranks)).items():
            found[name] = (result, folder / str(ranks) / f"run-{name}")
    return found


def record_of(runs: dict[str, Any], name: str, start: int = 0) -> dict[int, RankRecord]:
    result, folder = runs[name]
    assert "output" not in result, result["output"]
    return read_start(start_folder(folder, start))


def differences(record: dict[int, RankRecord], other: dict[int, RankRecord]) -> list[tuple[int, str, int]]:
    """Return (step, key, rank) of all that differs, in the order of steps and stages."""
    found = [(step, key, rank) for rank in record for step in record[rank].rows.keys() & other[rank].rows.keys()
             for key in differing_keys(record[rank].rows[step], other[rank].rows[step])]
    return sorted(found, key=lambda each: (each[0], list(DIGEST).index(each[1]), each[2]))


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a checkpoint. The bytes of the files differ between any two runs."""
    found = {}
    for path in sorted(checkpoint.rglob("*.pt")):
        for keys, value in tree_flatten_with_path(torch.load(path, weights_only=False))[0]:
            if torch.is_tensor(value):
                found[f"{path.name}{keystr(keys)}"] = value.reshape(-1).view(torch.uint8)
    assert len(found) > 10
    return found


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_the_recorder_changes_no_bit_of_losses_and_checkpoints(layout: str, runs: dict[str, Any]) -> None:
    rows, tensors = [], []
    for name in ("on", "off"):
        _, folder = runs[f"{layout}-{name}"]
        rows.append([[row[key] for key in ("loss", "grad_norm", "param_norm")] for row in read_metrics(folder)
                     if "loss" in row])
        tensors.append(tensors_of(folder / "checkpoints" / f"global_step{STEPS}"))
    assert len(rows[0]) == STEPS
    assert rows[0] == rows[1]
    assert {*tensors[0]} == {*tensors[1]}
    assert [name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])] == []
    assert not (runs[f"{layout}-off"][1] / "flight").exists()


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_micro_batches_that_are_computed_again_do_not_show_in_the_record(layout: str, runs: dict[str, Any]) -> None:
    record, compared = record_of(runs, f"{layout}-on"), record_of(runs, f"{layout}-compared")
    assert [*compared[0].rows] == [*record[0].rows] == [*range(1, STEPS + 1)]
    assert all({*row} == {*record[rank].rows[step]} for rank in compared for step, row in compared[rank].rows.items())
    assert differences(record, compared) == []


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_a_resume_has_the_rows_of_the_uninterrupted_run(layout: str, runs: dict[str, Any]) -> None:
    whole, first = record_of(runs, f"{layout}-on"), record_of(runs, f"{layout}-saved")
    second = record_of(runs, f"{layout}-resumed", start=1)
    assert [*first[0].rows, *second[0].rows] == [*whole[0].rows] == [*range(1, STEPS + 1)]
    assert len(whole) == (LAYOUTS[layout] if layout in LAYOUTS else OTHERS[layout])[0]
    assert differences(whole, first) == differences(whole, second) == []
    row, header = whole[0].rows[STEPS], whole[0].header
    assert {*DIGEST} == {*row} - {*UNCOMPARED}
    assert len(row["weights"]) == len(row["layers_forward"]) == len(row["gradients"]) == len(header.layers)
    assert whole[0].rows[1]["weights_after"] == whole[0].rows[2]["weights"]
    assert whole[0].rows[1]["states_after"] == whole[0].rows[2]["states"]


@pytest.mark.parametrize(("layout", "plant"), PLANTED_CASES)
def test_a_planted_fault_shows_first_in_its_stage_on_its_rank(layout: str, plant: str, runs: dict[str, Any]) -> None:
    planted = record_of(runs, f"{layout}-{plant}", start=1)
    found = differences(record_of(runs, f"{layout}-resumed", start=1), planted)
    last = LAYOUTS[layout][0] - 1
    step, key, rank = found[0]
    print(layout, plant, found[:6])
    assert (step, stage_of(key), rank) == (PLANTED, PLANTS[plant][1], last)
    same_key = {each[2] for each in found if each[:2] == (step, key)}
    assert same_key == {last}, "another rank shows it, too"
    if key == "layers_forward":
        clean = record_of(runs, f"{layout}-resumed", start=1)[last]
        values = zip(clean.header.layers, clean.rows[step][key], planted[last].rows[step][key], strict=True)
        assert next(layer for layer, one, other in values if one != other) == LAYOUTS[layout][4]


def test_bad_steps_rollbacks_requests_and_a_folder_that_cannot_be_written(corpus: str, tmp_path: Path) -> None:
    """One launch of two ranks. A rank that is killed leaves its rows, too: that is the last case."""
    values = config(1, precision="bf16")
    usual, samples = run_flags(corpus), 16
    nan = {"kind": "nan", "step": 0, "consumed_samples": samples * (PLANTED - 1)}
    fp16 = {**config(0), "fp16": {"enabled": True, "initial_scale_power": 30}}
    cases = [case("nan", "", values, usual, plant=nan),
             case("request", "", values, {**usual, "flight_steps": 2}, plant={
                 "kind": "request", "rank": 0, "step": 4, "run": "run-request"}),
             case("fp16", "", fp16, {**usual, "emulate_fp16": True, "train_steps": 2, "max_bad_steps": 20}),
             case("file", "", values, {**usual, "train_steps": 3}),
             case("killed", "", values, usual, plant={"kind": "kill", "rank": 1, "step": PLANTED})]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "run-file").mkdir()
    (tmp_path / "run-file" / "flight").write_text("")
    ranks = run_ranks([str(WORKERS / "plant_worker.py"), "cases.json", "results.json"], 2, cwd=tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [results.get(name, {}).get("code") for name in ("nan", "request", "fp16", "file")] == [0] * 4, \
        ranks[0].stdout + ranks[1].stdout

    run = tmp_path / "run-nan"
    assert [row["event"] for row in read_events(run) if row["event"] in ("skip", "rollback")] == ["skip", "rollback"]
    kept = read_start(kept_folder(run, PLANTED, "spike"))
    assert [kept[rank].rows[PLANTED]["skipped"] for rank in kept] == ["non-finite loss"] * 2
    bad = kept[1].rows[PLANTED]
    assert bad["loss"] != bad["loss"]
    assert bad["weights_after"] == bad["weights"]
    after = read_start(start_folder(run, 0))[1].rows
    assert after[SAVED + 1]["samples"] == [samples * PLANTED, samples * (PLANTED + 1)], "the rollback skips the others"

    run = tmp_path / "run-request"
    (folder,) = (run / "flight" / "kept").iterdir()
    assert {*read_start(folder)} == {0, 1}
    assert [*read_start(start_folder(run, 0))[0].rows] == [3, 4, 5, 6], "at least the last two steps"
    assert not (run / "RECORD").exists()

    rows = read_start(start_folder(tmp_path / "run-fp16", 0))[0].rows
    assert [row["skipped"] for row in rows.values()] == ["fp16 overflow"] * 2
    assert rows[1]["loss_scale"] == 2**30 > rows[2]["loss_scale"]

    warnings = [line for rank in ranks for line in rank.stdout.splitlines() if "rows of the flight recorder" in line]
    assert len(warnings) == 1, warnings
    killed = read_start(start_folder(tmp_path / "run-killed", 0))
    assert [max(killed[rank].rows) for rank in (0, 1)] == [PLANTED, PLANTED]


def test_weights_on_a_device_are_not_read() -> None:
    """Several GPUs normalize the weights of masked labels on the device."""
    from pretrain.extensions.replay.recorder import _crc, _tensors_of

    tokens, on_device = torch.arange(8).view(2, 4), torch.empty(2, 4, device="meta")
    assert _crc(_tensors_of([(tokens, (tokens, on_device))])) == _crc([tokens, tokens])
