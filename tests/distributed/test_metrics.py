"""Rows of metrics.jsonl in several layouts, and the same values in every monitor: real trainings on two ranks."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.model.layers.moe import STATISTICS
from pretrain.monitor.rows import EVALUATION_ROW, OPTIONAL_KEYS, TRAINING_ROW
from pretrain.stored_json import read_json
from tests.support.cases import CPU, case, config, flags
from tests.support.extensions import modules_of_extensions
from tests.support.launch import run_worker
from tests.support.run_rows import rows

STEPS, LOGGED, EVALUATED, CLIP = 8, (1, 3, 6, 8), (3, 6, 8), 1.1
MONITORS = {
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
    "tensorboard": {"enabled": True, "output_path": "tb", "job_name": "job"}, "wandb": {"enabled": True},
    "comet": {"enabled": True, "samples_log_interval": 1}}
FP32 = {
    "zero0": config(0), "zero1": config(1), "zero2": config(2), "zero2_cpu": config(2, offload_optimizer=CPU),
    "zero3": config(3), "zero3_cpu": config(3, offload_optimizer=CPU, offload_param=CPU),
    "pipeline_zero0": config(0, stages=2, accumulation=4), "pipeline_zero1": config(1, stages=2, accumulation=4)}
WATCHED = ("zero2", "pipeline_zero1")  # layouts with monitors
BF16 = {"bf16_zero1": config(1, precision="bf16"), "bf16_zero3": config(3, precision="bf16")}
LAYOUTS = {**FP32, **BF16}
RECIPE = {"label_smoothing": 0.1, "z_loss": 1e-3, "document_attention": True, "packing": "best_fit", "seed": 7,
          "batch_schedule": "0:8,16:16"}
WITH_RECIPE = {"recipe_zero3": config(3, precision="bf16"), "recipe_fp16_zero2": config(2, precision="fp16"),
               "recipe_pipeline": config(1, precision="bf16", stages=2, accumulation=4)}
NOTE = "why this run: a <b>first</b> try\x1b[2J"
# all other functions may read values from the device in logged steps only
ON_CPUS = ("data/loader.py:_read", "model/kernels/documents.py:")
IN_SAVES = ("checkpoint/", "distributed/collectives.py")
BEFORE_UPDATES = ("engine/patches/", "resilience/")
ALLOWED = (*ON_CPUS, *IN_SAVES, *BEFORE_UPDATES,
           *(place for module in modules_of_extensions("device_reads") for place in module.ALLOWED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def results(corpus: str, folder: Path) -> dict[str, Any]:
    run_flags = flags(corpus, steps=STEPS, log_interval=3, eval_interval=3, eval_steps=2, save_interval=4,
                      eod_mask_loss=True)
    cases = []
    for name, values in LAYOUTS.items():
        monitors = {key: {**block, "output_path": f"{name}/{block['output_path']}"} if "output_path" in block else block
                    for key, block in MONITORS.items()} if name in WATCHED else {}
        own_flags = {**run_flags, "trackio": "project", "note": NOTE} if name in WATCHED else run_flags
        cases.append(case(name, "run", {**values, "gradient_clipping": CLIP, **monitors}, own_flags,
                          count_waits=name not in ("zero0", *WATCHED)))
    cases += [case(name, "run", {**values, "gradient_clipping": CLIP},
                   {**run_flags, **RECIPE, "emulate_fp16": "fp16" in values}, count_waits=True)
              for name, values in WITH_RECIPE.items()]
    two_steps = flags(corpus, steps=2)
    cases += [case(f"plain_{name}", "plain_monitors", {**LAYOUTS[name], "wandb": {"enabled": True}}, two_steps)
              for name in WATCHED]
    return run_worker("metrics_worker.py", cases, 2, folder)


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return rows(folder / f"run-{name}")


def training_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder, name) if "loss" in row]


def since_last_row(step: int) -> range:
    """Return the indices of the steps that the row of a logged step covers."""
    return range(max([0, *(earlier for earlier in LOGGED if earlier < step)]), step)


def test_rows_equal_what_full_parameters_and_every_step_give(results: dict[str, Any], folder: Path) -> None:
    found, rows = results["zero0"], training_rows(folder, "zero0")
    assert [row["step"] for row in rows] == list(LOGGED)
    own_means = [[total / weight for total, weight in rank] for rank in results["zero2"]["losses"]]
    assert own_means[0] != own_means[1]
    for row in rows:
        steps, last = since_last_row(row["step"]), row["step"] - 1
        assert row["param_norm"] == pytest.approx(found["param_norms"][last], rel=1e-6)
        assert row["update_ratio"] == pytest.approx(found["update_ratios"][last], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(found["norms"][last], rel=1e-6)
        assert row["grad_norm_max"] == pytest.approx(max(found["norms"][step] for step in steps), rel=1e-6)
        assert row["clip_rate"] == pytest.approx(sum(found["norms"][step] > CLIP for step in steps) / len(steps))
        assert row["clip_norm"] == CLIP
        assert row["loss_max"] == pytest.approx(max(rank[step] for rank in own_means for step in steps), rel=1e-5)
    assert 0 < rows[2]["clip_rate"] < 1 or len({row["clip_rate"] for row in rows}) > 1, "CLIP separates no steps"


def test_every_key_is_defined(results: dict[str, Any], folder: Path) -> None:
    training, evaluations = training_rows(folder, "zero0"), [row for row in rows_of(folder, "zero0") if "split" in row]
    assert {frozenset(row) for row in training} == {frozenset(TRAINING_ROW)}
    assert {frozenset(row) for row in evaluations} == {frozenset(EVALUATION_ROW) - {"mean_of_sets"}}
    assert {"z_loss", "noise_scale", *STATISTICS} == set(OPTIONAL_KEYS)
    assert set(training_rows(folder, "recipe_zero3")[0]) - set(TRAINING_ROW) == {"z_loss"}


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "zero0"])
def test_every_layout_gives_the_same_values(name: str, results: dict[str, Any], folder: Path) -> None:
    assert results[name]["code"] == 0
    tolerance = 2e-2 if name in BF16 else 1e-4
    keys = ["loss", "grad_norm", "grad_norm_max", "param_norm", "update_ratio"]
    if "pipeline" not in name:  # there each rank has all samples
        keys.append("loss_max")
    for row, expected in zip(training_rows(folder, name), training_rows(folder, "zero0"), strict=True):
        assert {key: row[key] for key in keys} == pytest.approx({key: expected[key] for key in keys}, rel=tolerance)
        assert row["tflops_exact_per_device"] < row["tflops_per_device"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_phases_are_parts_of_the_step(name: str, results: dict[str, Any], folder: Path) -> None:
    for row in training_rows(folder, name):
        phases = [row[f"{phase}_time_ms"] for phase in ("data", "forward", "backward", "reduce", "optimizer")]
        overlaps = "zero2" in name or "zero3" in name
        assert (row["reduce_time_ms"] is None) == overlaps
        assert all(phase > 0 for phase in phases if phase is not None)
        if row["step"] == 3:  # the other ranks' phases contain the waiting for rank 0 after its start, saves and so on
            # a wide limit, which only another unit exceeds: on a busy machine a rank may wait long
            assert sum(phase or 0 for phase in phases[1:]) < 50 * row["step_time_ms"]
        assert (row["pipeline_bubble"] is not None) == ("pipeline" in name)
        assert 0 < (row["pipeline_bubble"] or 0.5) < 1
        assert 0 < row["goodput"] < 1
    times = {row["step"]: (row["save_time_ms"] > 0, row["eval_time_ms"] > 0) for row in training_rows(folder, name)}
    assert times == {1: (False, False), 3: (False, False), 6: (True, True), 8: (False, True)}


@pytest.mark.parametrize("name", [*(name for name in LAYOUTS if name not in ("zero0", *WATCHED)), *WITH_RECIPE])
def test_nothing_waits_for_the_device_between_logged_steps(name: str, results: dict[str, Any]) -> None:
    """Counted are the methods of torch.Tensor that return a Python value, by the function that calls them.

    DeepSpeed itself and its work-arounds read whether the gradient norm is finite; resilience/ reads values of the step
    before, which are already on the host. So do some extensions.
    """
    for rank in results[name]["waits"]:
        assert len(rank) == STEPS - 1
        for step, calls in enumerate(rank, 1):
            ours = {call for call in calls if not call.startswith(ALLOWED)}
            assert bool(ours) == (step in LOGGED), (step, ours)


@pytest.mark.parametrize("name", WATCHED)
def test_every_monitor_gets_the_values_of_the_rows(name: str, results: dict[str, Any], folder: Path) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in rows_of(folder, name):
        names = {"eval_loss": f"Evaluation/{row['split']}_loss", "eval_ppl": f"Evaluation/{row['split']}_ppl"} \
            if "split" in row else {key: f"Train/Samples/{'train_loss' if key == 'loss' else key}" for key in row}
        for key, label in names.items():
            if key not in ("consumed_samples", "time") and row[key] is not None:
                expected.setdefault(label, []).append((row["consumed_samples"], row[key]))
    batch = training_rows(folder, name)[0]["global_batch_size"]
    assert [x for x, _ in expected["Train/Samples/train_loss"]] == [batch * step for step in LOGGED]
    assert [x for x, _ in expected["Evaluation/valid_loss"]] == [batch * step for step in EVALUATED]
    assert read_csv(folder / name / "csv" / "job") == \
        {label.replace("/", "_"): points for label, points in expected.items()}
    assert read_tensorboard(folder / name / "tb" / "job") == \
        {label: [(x, float(np.float32(value))) for x, value in points] for label, points in expected.items()}
    for service in ("wandb", "comet", "trackio"):  # fake packages: tests/distributed/workers/fake_services.py
        found: dict[str, list[tuple[int, float]]] = {}
        for label, value, x in results[name]["sent"][service]:
            found.setdefault(label, []).append((x, value))
        (note,) = found.pop("note", None) or found.pop("notes")  # W&B calls it notes
        assert note == (0, NOTE.replace("\x1b", "\\x1b"))
        assert found == expected
    assert read_json(folder / f"run-{name}" / "run.json")[-1]["flags"]["note"] == NOTE


def read_csv(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for path in folder.glob("*.csv"):
        header, *lines = csv.reader(path.read_text().splitlines())
        assert header[0] == "step"
        found[path.stem] = [(int(x), float(value)) for x, value in lines]
    return found


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    (note,) = events.Tensors("note/text_summary")
    assert (note.step, note.tensor_proto.string_val) == (0, [NOTE.replace("\x1b", "\\x1b").encode()])
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_plain_deepspeed_writes_other_values(results: dict[str, Any]) -> None:
    """If this fails, DeepSpeed has changed what its engines write: then revise patches/monitors.py, take_monitors."""
    plain, pipeline = ([(label.rpartition("/")[2], x) for label, _, x in results[f"plain_{name}"]["sent"]["wandb"]]
                       for name in WATCHED)
    assert plain == [("lr", 16), ("lr", 32)]
    assert pipeline == [("lr", 16), ("train_loss", 16), ("lr", 32), ("train_loss", 32),
                        ("eval_loss", 32), ("eval_loss", 32)]
