"""compare_zero.py --calibrate: fits to real runs on CPUs, and to records as a run on a GPU would write them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import ConfigError
from pretrain.extensions.planner.main import main
from pretrain.extensions.planner.step_time.calibrate import calibrate, predict_run
from pretrain.extensions.planner.step_time.measured_run import read_measured_run
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS
from pretrain.memory.hardware import GPUS
from tests.support.launch import ROOT, train_ranks
from tests.support.rejection import rejection

FLAGS = ["--model", "tiny", "--model_overrides", "vocab_size=256,n_layer=2,n_embd=128", "--split", "80,20,0",
         "--eval_steps", "1", "--log_interval", "2", "--train_steps", "12", "--learning_rate", "1e-3",
         "--save_interval", "100"]


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one rank with ZeRO-1, and two ranks with ZeRO-2, accumulation and longer sequences."""
    folder = tmp_path_factory.mktemp("calibrate")
    for name, ranks, stage, others in (
            ("one", 1, 1, ["--seq_length", "64", "--micro_batch_size", "4"]),
            ("two", 2, 2, ["--seq_length", "128", "--micro_batch_size", "2", "--gradient_accumulation_steps", "4"])):
        done, *_ = train_ranks(ranks, [*FLAGS, *others, "--train_data", corpus, "--save", str(folder / name),
                                       "--deepspeed_config", str(ROOT / f"ds_configs/zero{stage}_bf16.json")], folder)
        assert done.returncode == 0, done.stdout
    return folder


def test_one_run_predicts_another_layout(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The calibrated prediction equals the measurement. Errors for other layouts are printed: the machine is shared."""
    main(["--calibrate", str(runs / "one"), "--world_size", "2", "--seq_length", "128", "--json"])
    found = json.loads(capsys.readouterr().out)
    (run,) = found["calibration"]["runs"]
    assert run["after_seconds"] == pytest.approx(run["measured_seconds"], rel=0.15)
    assert set(run["measured_phases"]) == {"forward", "backward", "update"}
    assert found["cluster"]["gpu"]["kind"] == "cpu"
    assert found["rows"][0]["layout"]["device_kind"] == "cpu"
    assert found["rows"][0]["fits"]
    assert found["time_parameters"] == found["calibration"]["parameters"] != vars(DEFAULT_PARAMETERS)
    other = read_measured_run(str(runs / "two"))
    predicted = predict_run(other, calibrate([str(runs / "one")]).parameters).total_seconds
    print(f"\ntwo ranks, ZeRO-2, 4 micro-batches: predicted {predicted * 1e3:.1f} ms, measured "
          f"{other.step_seconds * 1e3:.1f} ms, ratio {predicted / other.step_seconds:.2f}")
    assert other.layout.gradient_accumulation_steps == 4
    assert predicted > run["after_seconds"]  # four micro-batches of the same tokens


def test_several_runs_determine_more_parameters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(runs / "one"), str(runs / "two")]
    found = calibrate(paths)
    assert {"compute_speed", "launch_seconds", "link_efficiency"} <= set(found.fitted)
    main(["--calibrate", *paths])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("predicted after the calibration") == 2
    assert f"the model of {paths[0]}" in text
    assert "which MFU takes as the peak rate" in text


def change(run: Path, folder: Path, name: str, **values: Any) -> str:
    """Copy the record and rows of a run, with other values in its newest start. Return the path."""
    copy = folder / name
    copy.mkdir()
    shutil.copy(run / "metrics.jsonl", copy)
    starts = json.loads((run / "run.json").read_text())
    starts[-1] |= values
    (copy / "run.json").write_text(json.dumps(starts))
    return str(copy)


def on_a100(run: Path, folder: Path, name: str) -> str:
    """Return a record as one A100 would write it. Without a GPU here, its times are set by each test."""
    hardware = {"host": "a", "cpu": "x", "cores": 64, "memory_bytes": 10**12, "ranks": 1, "gpus": [
        {"name": "NVIDIA A100-SXM4-80GB", "memory_bytes": GPUS["a100"].memory_bytes}]}
    return change(run, folder, name, hardware=[hardware], environment={})


def set_times(path: str, seconds: float) -> None:
    """Write rows with this step time and without phases."""
    rows = [{"step": step, "step_time_ms": seconds * 1e3} for step in range(1, 8)]
    Path(path, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_on_a_gpu_calibrates_questions_about_this_gpu(runs: Path, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    path = on_a100(runs / "one", tmp_path, "gpu")
    set_times(path, 1.0)
    slow_launch = replace(DEFAULT_PARAMETERS, launch_seconds=3e-5)
    set_times(path, predict_run(read_measured_run(path), slow_launch).total_seconds)
    found = calibrate([path], "a100")
    assert found.fitted == ("launch_seconds",)  # so small a model waits for the host
    assert found.parameters.launch_seconds == pytest.approx(3e-5, rel=0.03)
    main(["--calibrate", path, "--world_size", "8", "--model", "gpt2"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search("(30|30.1|29.9) us to launch a kernel", text)
    for flags, message in ((["--gpu", "h100"], "not on --gpu h100"), (["--gpu", "a100-40"], "not on --gpu a100-40"),
                           (["--gpu", "cpu"], "not on --gpu cpu")):
        with pytest.raises(ConfigError, match=message):
            main(["--calibrate", path, *flags])
    with pytest.raises(ConfigError, match="different devices"):
        calibrate([path, str(runs / "one")])


def test_a_start_without_steps_is_not_the_measured_one(runs: Path, tmp_path: Path) -> None:
    """A run that is complete adds a record to run.json when it is started again."""
    path = change(runs / "one", tmp_path, "again")
    starts = json.loads(Path(path, "run.json").read_text())
    starts.append({**starts[-1], "first_step": 12, "layout": {"world_size": 7}})
    Path(path, "run.json").write_text(json.dumps(starts))
    assert read_measured_run(path) == replace(read_measured_run(str(runs / "one")), path=path)


def test_runs_that_cannot_be_used_are_rejected(runs: Path, tmp_path: Path) -> None:
    one = runs / "one"
    few = change(one, tmp_path, "few")
    set_times(few, 1.0)
    rows = Path(few, "metrics.jsonl").read_text().splitlines()
    Path(few, "metrics.jsonl").write_text("\n".join(rows[:3]) + "\n")
    empty = change(one, tmp_path, "empty")
    Path(empty, "metrics.jsonl").unlink()
    unknown = on_a100(one, tmp_path, "unknown")
    starts = json.loads(Path(unknown, "run.json").read_text())
    starts[-1]["hardware"][0]["gpus"][0]["name"] = "NVIDIA Something"
    Path(unknown, "run.json").write_text(json.dumps(starts))
    cases: list[tuple[list[str], str]] = [
        ([str(tmp_path / "missing")], "there is no run folder"), ([str(tmp_path)], "cannot read the record"),
        ([few], "after its first one (found 2)"), ([empty], "(found 0)"),
        ([str(one), "--gpu", "h100"], "ran on CPUs"), ([unknown], "not in the table of GPUs"),
        ([change(one, tmp_path, "old", hardware=[])], "cannot use the start (hardware is empty)"),
        ([change(one, tmp_path, "times", layer_times={"nanoseconds": 5})], "layer_times is 5 instead of a list"),
        ([change(one, tmp_path, "model", model_config=None)], "model_config is null instead of"),
        ([str(one), "--kernel_efficiency", "0.5"], "--calibrate fits this value"),
        ([str(one), "--find", "max_seq"], "no effect with --find"),
        ([str(one), "--num_parameters", "1e9", "--world_size", "2"], "no effect with --num_parameters"),
    ]
    for arguments, message in cases:
        error = rejection(main, ["--calibrate", *arguments])
        assert message in error, arguments
