"""`ds-pretrain ladder`: smaller models of a family, the plan for a budget, real runs, and the prediction."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.extension import Extension
from pretrain.extensions.ladder.expected_curve import counted_parameters
from pretrain.extensions.ladder.extension import EXTENSION
from pretrain.extensions.ladder.ladder_file import DECAYED, STABLE, Ladder, Law
from pretrain.extensions.ladder.main import decayed_part, expected_loss, main
from pretrain.extensions.ladder.page import warnings_of
from pretrain.extensions.ladder.plan import FEWEST_STEPS, Batch, Plan, Wish, eval_steps_of, make_plan, plan_lines
from pretrain.extensions.ladder.target import Size, TargetRun, choose_sizes, family_sizes, read_target, say_left_out
from pretrain.model.config import load_model_config
from pretrain.stored_json import build, read_object
from tests.support.launch import ROOT
from tests.support.rejection import rejection

MODEL = {"model_type": "llama", "vocab_size": 64, "hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 12,
         "num_key_value_heads": 4, "intermediate_size": 256, "max_position_embeddings": 32}
DEEPSPEED = {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
             "scheduler": None, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
RUN = {"deepspeed_config": "ds.json", "model": "model.json", "train_data": "train", "valid_data": "valid",
       "seq_length": 32, "micro_batch_size": 4, "train_steps": 400, "learning_rate": 2e-3, "mup_base_width": 32,
       "lr_schedule": "wsd", "lr_warmup_steps": 10, "eval_steps": 4, "save": "run"}
LAWS = {DECAYED: Law(1.5, 8.0, 60.0, 0.3, 0.5), STABLE: Law(1.6, 8.0, 70.0, 0.3, 0.5)}
FLAGS = ["--target", "run.yaml", "--budget", "10m", "--parameters", "2k,9k,30k", "--tokens", "4096"]


def write_run(folder: Path, **changes: Any) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump({name: value for name, value in {**RUN, **changes}.items()
                                                     if value is not None}))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with token files, a model, a JSON and run.yaml; the current one."""
    monkeypatch.chdir(tmp_path)
    make_world(tmp_path)
    return tmp_path


def make_world(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, documents in (("train", 160), ("valid", 10)):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(documents):
                writer.add_document(np.append(random.integers(1, 5, 199).cumsum() % 63 + 1, 0))
            writer.finalize({"vocab_size": 64, "eod_token": 0})
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "ds.json").write_text(json.dumps({key: value for key, value in DEEPSPEED.items() if value is not None}))
    write_run(folder)


def target_of(folder: Path, **changes: Any) -> TargetRun:
    write_run(folder, **changes)
    return read_target("run.yaml", world_size=1, device=cpu_device())


@dataclass(frozen=True)
class OtherFlags:
    other_rate: float = 1.0


def test_flags_of_extensions_that_smaller_runs_do_not_get_are_named(monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("pretrain.extensions.ladder.target.extensions",
                        lambda: [EXTENSION, Extension("other", "Has a flag.", settings=OtherFlags)])
    say_left_out(["note", "expected_curve", "other_rate", "extension"])
    assert "the smaller runs do without --other_rate, --extension of the target" in capsys.readouterr().err
    say_left_out(["note", "expected_curve"])
    assert capsys.readouterr().err == ""


@dataclass(frozen=True)
class FakeTimes:
    """Steps whose time is proportional to parameters and tokens."""

    seconds_per_product: float = 1e-9
    start_seconds: float = 5.0

    def step_seconds(self, size: Size, batch: Batch) -> float:
        return self.seconds_per_product * counted_parameters(size.config) * batch.tokens


@pytest.mark.parametrize("preset", ["gpt2", "pythia-410m", "llama3-8b", "mixtral-8x7b", "gemma2-2b", "qwen3-0.6b"])
def test_smaller_models_have_the_proportions_of_the_target(preset: str) -> None:
    target = load_model_config(preset)
    sizes = family_sizes(target)
    assert [size.parameters for size in sizes] == sorted({size.parameters for size in sizes})
    for size in sizes:
        config, part = size.config, size.config.hidden_size / target.hidden_size
        assert config.head_size == target.head_size
        assert (config.vocab_size, config.num_experts) == (target.vocab_size, target.num_experts)
        assert abs(config.num_layers - part * target.num_layers) <= max(0.5, 1 - part * target.num_layers)
        for name in ("intermediate_size", "moe_intermediate_size"):
            assert getattr(config, name) == pytest.approx(part * getattr(target, name), abs=8)
        ratio = target.num_heads // target.num_kv_heads
        if config.num_heads % ratio == 0:
            assert config.num_heads == ratio * config.num_kv_heads
    chosen = choose_sizes(sizes, largest=counted_parameters(target) / 4, spread=16, count=5)
    assert chosen[-1].parameters <= counted_parameters(target) / 4
    assert len(chosen) >= 3


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, TargetRun]:
    """The target with several numbers of steps."""
    folder = tmp_path_factory.mktemp("targets")
    make_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {steps: target_of(folder, train_steps=steps) for steps in (200, 1000, 30_000)}


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(budget=st.floats(200, 1e6), speed=st.floats(1e-11, 1e-9), tokens=st.none() | st.integers(2000, 20_000),
       steps=st.sampled_from([200, 1000, 30_000]))
def test_a_plan_fits_its_budget_and_branches_begin_at_checkpoints(targets: dict[int, TargetRun], budget: float,
                                                                  speed: float, tokens: int | None, steps: int) -> None:
    target = targets[steps]
    plan = make_plan(target, Wish(budget, tokens=tokens, largest_factor=1e9), FakeTimes(speed), ranks=1, request={})
    assert plan.seconds <= budget
    assert 2 * plan.models[-1].parameters <= target.parameters
    assert plan.tokens[-1] == pytest.approx(tokens or plan.tokens[-1], abs=4 * plan.batch.tokens)
    assert plan.tokens[-1] <= max(tokens or 0, min(target.tokens, target.data_tokens)) + 4 * plan.batch.tokens
    assert target.plan.layout.global_batch_size % plan.batch.global_batch_size == 0
    assert plan.lengths.shortest >= FEWEST_STEPS - 1 or plan.batch.global_batch_size == 1
    samples = target.plan.args.eval_steps * target.plan.layout.global_batch_size
    assert plan.eval_steps * plan.batch.global_batch_size == samples
    for model in plan.models:
        longest, *branches = plan.runs(model)
        assert longest.flags["lr_warmup_steps"] <= plan.lengths.stable
        for run in branches:
            name, _, start = run.flags["resume_from"].partition("@")
            assert name == f"runs/{longest.name}"
            assert int(start) % longest.flags["save_interval"] == 0
            assert run.flags["train_steps"] - run.flags["lr_wsd_steps"] == int(start)
    assert build(Plan, json.loads(json.dumps(asdict(plan)))) == plan


def test_learning_rates_of_smaller_models(world: Path) -> None:
    tokens = target_of(world).plan.layout.tokens_per_step
    assert target_of(world).rate(24, tokens) == 2e-3  # muP
    standard = target_of(world, mup_base_width=None)
    assert standard.rate(96 // 16, tokens) == pytest.approx(2e-2)  # GPT-3: a tenth of the rate at 16 times the width
    assert standard.rate(96, tokens // 4) == pytest.approx(1e-3)


def test_a_far_target_is_warned_about_and_rejected(world: Path) -> None:
    target = target_of(world, train_steps=8000, micro_batch_size=16)  # 4.1 M tokens; the data has 32,000
    wish, times = Wish(60, parameters=[2000, 9000, 30000]), FakeTimes()
    with pytest.raises(ConfigError, match=r"--budget: the prediction is .* beyond .*: 50 times is the limit"):
        make_plan(target, wish, times, ranks=1, request={})
    plan = make_plan(target, replace(wish, largest_factor=1000), times, ranks=1, request={})
    assert "warning: the prediction is" in plan_lines(plan, target)[-1]


def test_the_expected_curve_follows_the_schedule_of_the_target(world: Path) -> None:
    target = target_of(world)
    length = target.plan.length
    for step, name in ((100, STABLE), (320, STABLE), (400, DECAYED)):
        expected = LAWS[name].loss(target.parameters, length.tokens_after(step))
        assert expected_loss(target, LAWS, step).loss == pytest.approx(expected, rel=1e-3)
    between = expected_loss(target, LAWS, 360).loss
    tokens = length.tokens_after(360)
    assert LAWS[DECAYED].loss(target.parameters, tokens) < between < LAWS[STABLE].loss(target.parameters, tokens)
    cosine = target_of(world, lr_schedule="cosine")
    parts = [decayed_part(cosine, step) for step in range(10, 401)]
    assert parts == sorted(parts)
    assert parts[0] < 1e-3
    assert parts[-1] == pytest.approx(1)
    assert decayed_part(target_of(world, lr_schedule="constant"), 400) == 0


def fake_run(folder: Path, name: str, model: int, tokens_per_step: int, steps: dict[int, str]) -> None:
    """Write the metrics of a finished run whose losses follow LAWS."""
    run = folder / "runs" / name
    run.mkdir(parents=True)
    rows = [{"step": step, "loss": 2.0, "consumed_tokens": step * tokens_per_step} for step in steps]
    rows += [{"step": step, "split": "valid", "eval_loss": LAWS[law].loss(model, step * tokens_per_step)}
             for step, law in steps.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sorted(rows, key=_order)))


def _order(row: dict[str, Any]) -> tuple[int, bool]:
    return row["step"], "split" in row


def fake_model(plan: Plan, folder: Path, number: int) -> None:
    """Write the finished runs of a model of the plan."""
    model = plan.models[number]
    for run in plan.runs(model):
        steps, every = run.flags["train_steps"], run.flags["eval_interval"] or run.flags["train_steps"]
        begun = range(every, plan.lengths.decay_start(steps) + 1, every)
        fake_run(folder, run.name, model.parameters, plan.batch.tokens,
                 {**dict.fromkeys(begun, STABLE), steps: DECAYED})


def test_finished_runs_are_fitted_and_the_target_is_predicted(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = target_of(world)
    from pretrain.extensions.ladder import main as module
    wish = Wish(600, [2000, 9000, 30000], 4096)
    plan = make_plan(target, wish, FakeTimes(), ranks=1, request=module._request(target, wish, 1))
    Path("out").mkdir()
    Path("out/plan.json").write_text(json.dumps(asdict(plan)))
    for number in range(len(plan.models)):
        fake_model(plan, Path("out"), number)
    fake_run(world, "../run", target.parameters, RUN["seq_length"] * RUN["micro_batch_size"],  # type: ignore[operator]
             {400: DECAYED})
    command = [*FLAGS, "--ranks", "1", "--out", "out", "--gpu", "h100"]
    run_main(command)
    out = capsys.readouterr().out
    ladder = build(Ladder, read_object(Path("out/ladder.json")))
    expected = LAWS[DECAYED].loss(target.parameters, target.tokens)
    assert ladder.target.loss == pytest.approx(expected, rel=2e-3)
    assert ladder.target.low <= expected * 1.002
    assert ladder.target.high >= expected * 0.998
    assert (ladder.scaling, ladder.family, ladder.vocab_size) == ("mup", "llama", 64)
    assert set(ladder.corpus) == {"train", "valid"}
    assert ladder.target.curve[-1].tokens == target.tokens
    assert len([point for point in ladder.points if point.decayed]) == 9
    assert f"expected loss of the target ({target.parameters:,} parameters" in out
    for text in ("half of the data: ", "lowest loss for the compute of the target", "measured by the run in run: "):
        assert text in out
    assert "alpha is" not in out
    bent = replace(ladder, laws={DECAYED: Law(2.0, 1e12, 60.0, 2.5, 0.4, noise=0.02)})
    assert [text.split(",")[0] for text in warnings_of(target, bent)][-2:] == [
        "alpha is 2.50", "the law misses the losses by 2.0%: expect errors of this size and larger ones"]
    page = Path("out/ladder.html").read_text()
    assert page.count("<svg") == 3
    assert "--expected_curve out/ladder.json" in page
    assert "h100" in page
    with pytest.raises(ConfigError, match="--out out: it holds the ladder of other settings, which differ in budget"):
        run_main([word if word != "10m" else "20m" for word in command])


def run_main(words: list[str]) -> int:
    """Run the command in this process."""
    before, sys.argv = sys.argv, ["ladder", *words]
    try:
        return main()
    finally:
        sys.argv = before


@pytest.mark.parametrize(("changes", "words", "message"), [
    ({}, ["--budget", "soon"], "--budget: found 'soon'; expected a time such as 2h or 90m"),
    ({}, ["--budget", "0h"], "--budget: found '0h'"),
    ({}, ["--parameters", "9k,9k"], "--parameters: it names 1 different model; the fit needs at least 3"),
    ({}, ["--parameters", "9k,x"], "--parameters: found 'x'"),
    ({}, ["--target", "none.yaml"], "none.yaml"),
    ({"init_from": "there"}, [], "init_from: a scaling law describes training from random weights"),
    ({"seq_length_schedule": "0:16,1000:32"}, [], "seq_length_schedule: the smaller runs would have other"),
    ({"valid_data": None, "split": "1,0,0"}, [], "no validation data"),
    ({"train_data": "missing"}, [], "missing"),
])
def test_wrong_inputs_are_rejected_in_one_line(world: Path, changes: dict[str, Any], words: list[str],
                                               message: str) -> None:
    write_run(world, **changes)
    assert message in rejection(run_main, [*FLAGS, *words])
    assert not Path("runs").exists()


def test_a_scheduler_in_the_json_is_rejected(world: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}
    (world / "ds.json").write_text(json.dumps({**DEEPSPEED, "scheduler": scheduler}))
    with pytest.raises(ConfigError, match="the DeepSpeed JSON has a scheduler"):
        target_of(world, lr_schedule=None, lr_warmup_steps=None, learning_rate=None, mup_base_width=None)


def test_real_runs_from_the_plan_to_the_page(world: Path) -> None:
    """One model is really trained; the runs of the others are written."""
    planned = ladder(world, *FLAGS, "--plan_only")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    out = world / "runs/ladder"
    plan = build(Plan, read_object(out / "plan.json"))
    assert len(plan.models) == 3
    assert all(model.name in planned.stdout for model in plan.models)
    assert not (out / "ladder.json").exists()
    for number in (0, 2):
        fake_model(plan, out, number)
    done = ladder(world, *FLAGS)
    assert done.returncode == 0, done.stdout + done.stderr
    points = build(Ladder, read_object(out / "ladder.json")).points
    trained = [point for point in points if point.run == plan.models[1].name]
    assert len([point for point in trained if point.decayed]) == 3
    assert len(trained) > 6
    assert all(1 < point.loss < math.log(64) for point in trained if point.decayed)
    names = [run.name for run in plan.runs(plan.models[1])]
    assert not any((out / "runs" / name / "checkpoints").exists() for name in names)
    rates = [json.loads(line)["lr"] for line in (out / "runs" / names[1] / "metrics.jsonl").read_text().splitlines()
             if '"lr"' in line]
    assert rates[-1] == pytest.approx(0.1 * plan.models[1].learning_rate, rel=0.05)
    again = ladder(world, *FLAGS)
    assert again.returncode == 0
    assert "starting DeepSpeed's launcher" not in again.stderr
    assert build(Ladder, read_object(out / "ladder.json")).points == points


def ladder(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pretrain", "ladder", *words], cwd=folder, capture_output=True,
                          text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"})


def test_evaluations_have_the_samples_of_the_target(world: Path) -> None:
    target = target_of(world)
    assert eval_steps_of(Batch(2, 2, 32), target) == 8
