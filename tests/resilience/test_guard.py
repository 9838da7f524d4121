"""Decisions of the guard, with an engine that only reports losses, norms and skipped updates."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.config.plan import RunLength
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.read_order import read_order
from pretrain.data.token_schedules import fixed_batch
from pretrain.engine.spikes import SpikeWindows
from pretrain.engine.update_guard import FP16_OVERFLOW, NON_FINITE_GRADIENT, NON_FINITE_LOSS, VETO, SkippedUpdate
from pretrain.errors import GuardError
from pretrain.monitor.read_run_folder import read_rows
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.resilience.guard import BadSteps, Guard
from pretrain.terminal import Screen

NAN = SkippedUpdate(NON_FINITE_LOSS, is_bad=True)
INFINITE_GRADIENT = SkippedUpdate(NON_FINITE_GRADIENT, is_bad=True)
OVERFLOW, AT_MINIMUM = SkippedUpdate(FP16_OVERFLOW, is_bad=False), SkippedUpdate(FP16_OVERFLOW, is_bad=True)


class Run:
    """A guard with a fake engine and a global batch of 8 samples."""

    def __init__(self, folder: Path, train: Any = None, **flags: Any) -> None:
        args = SimpleNamespace(**{"spike_window": 16, "spike_threshold": 6.0, "spike_policy": "warn",
                                  "max_bad_steps": 3, **flags})
        plan: Any = SimpleNamespace(args=args, last_step=10_000, length=RunLength(10_000, fixed_batch(8), seq_length=4),
                                    datasets={"train": train or SimpleNamespace(samples_per_epoch=50)},
                                    read_order=read_order(None, None))
        self.update_guard = SimpleNamespace(skipped=None, outcome=None)
        self.engine: Any = SimpleNamespace(device=torch.device("cpu"), skipped_steps=0,
                                           ds_pretrain=SimpleNamespace(update=SimpleNamespace(
                                               late=None, find=lambda kind: self.update_guard),
                                               spikes=SpikeWindows(length=args.spike_window,
                                                                   threshold=args.spike_threshold)),
                                           fp16_enabled=lambda: False)
        self.folder, self.step = folder, 0
        self.guard = Guard(plan, self.engine, RunFolder(folder, active=True), Screen(active=False))

    def train(self, loss: float = 3.0, norm: float = 1.0, skipped: SkippedUpdate | None = None) -> BadSteps | None:
        self.step += 1
        self.update_guard.skipped = skipped
        self.engine.get_global_grad_norm = lambda: norm
        return self.guard.observe(self.step, torch.tensor(loss), 8 * self.step)

    def events(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "events.jsonl")


def test_bad_steps_in_a_row_lead_to_a_rollback(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert [run.train(float("nan"), float("inf"), NAN) for _ in range(2)] == [None, None]
    assert run.train() is None  # a good step between them
    assert [run.train(float("nan"), float("inf"), NAN), run.train(3.0, float("inf"), INFINITE_GRADIENT)] == [None] * 2
    bad = run.train(float("inf"), float("inf"), NAN)
    assert bad == BadSteps("3 bad steps in a row (the last one: the loss is inf)", 4, 6, 48, weights_changed=False)
    assert [(row["step"], row["samples"], row["reason"]) for row in run.events()[-2:]] == [
        (5, [32, 40], "a gradient is NaN or infinite"), (6, [40, 48], "the loss is inf")]
    run.guard.return_to(2)
    run.step = 2
    assert [run.train(float("nan"), float("inf"), NAN) for _ in range(2)] == [None, None], "the count begins again"


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (3.0, float("inf"))])
def test_one_value_that_is_not_finite_makes_a_step_bad(tmp_path: Path, loss: float, norm: float) -> None:
    assert Run(tmp_path, max_bad_steps=1).train(loss, norm) is not None


def test_events_name_the_position_in_the_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(7):
        run.train()
    run.train(float("nan"), float("inf"), NAN)
    (event,) = run.events()
    assert (event["samples"], event["epoch"], event["position"]) == ([56, 64], 1, 6)


def test_events_name_the_samples_of_each_source_of_a_blend(tmp_path: Path) -> None:
    sources: Any = [SimpleNamespace(samples_per_epoch=size, seq_length=4, has_padding=False,
                               sources=[SimpleNamespace(prefix=name, is_remote=False)])
                    for name, size in (("web", 20), ("code", 9), ("unused", 5))]
    run = Run(tmp_path, train=BlendedSamples(sources, [0.75, 0.25, 0]))
    for _ in range(4):
        run.train()
    run.train(float("nan"), float("inf"), NAN)
    (event,) = run.events()
    assert event["samples"] == [32, 40]
    assert event["sources"] == [{"source": "web", "samples": [24, 30], "epoch": 1, "position": 4},
                                {"source": "code", "samples": [8, 10], "epoch": 0, "position": 8}]


@pytest.mark.parametrize(("policy", "action"), [("warn", "the update was made"),
                                                ("rollback", "the run returns to an earlier checkpoint")])
def test_a_spike_of_the_gradient_norm(tmp_path: Path, policy: str, action: str) -> None:
    run = Run(tmp_path, spike_policy=policy)
    for step in range(20):
        assert run.train(3.0, 1 + 0.1 * (step % 2)) is None
    bad = run.train(3.0, 6.0)
    assert (bad is not None) == (policy == "rollback")
    if bad is not None:
        assert (bad.first_step, bad.last_step, bad.consumed_samples, bad.weights_changed) == (21, 21, 168, True)
        assert bad.is_spike
    (event,) = run.events()
    assert (event["event"], event["name"], event["action"], event["samples"]) == ("spike", "grad_norm", action,
                                                                                  [160, 168])
    assert (event["value"], event["mean"]) == (6.0, pytest.approx(1.1))
    assert event["z"] > 6


@pytest.mark.parametrize(("norms", "reported"), [
    ([0.0] * 20, [1]), ([1.0, 1.0, 0.0, 0.0], [3]), ([1.0] * 10 + [0.0] * 5, []), ([None] * 5, [])])
def test_a_gradient_of_0_in_the_first_steps_is_reported_once(tmp_path: Path, norms: list[Any],
                                                              reported: list[int]) -> None:
    """Later ones are batches without a token to predict. An engine without a norm reports none."""
    run = Run(tmp_path)
    for norm in norms:
        assert run.train(3.0, norm) is None
    assert [row["step"] for row in run.events() if row["event"] == "no_gradient"] == reported


def test_the_veto_skips_a_spike_and_does_not_change_the_window(tmp_path: Path) -> None:
    run = Run(tmp_path, spike_policy="skip")
    for _ in range(20):
        run.train()
    spike, norm = torch.tensor(5.0), torch.tensor(1.0)
    assert [run.guard.veto(spike, norm) for _ in range(3)] == [True] * 3
    assert not run.guard.veto(torch.tensor(3.0), norm)
    assert run.train(5.0, 1.0, SkippedUpdate(VETO, is_bad=True)) is None
    (event,) = run.events()
    assert event["event"] == "skip"
    assert event["reason"].startswith("a spike of the loss: 5 (usual 3, ")


def test_overflows_of_fp16_are_normal_until_the_scale_is_at_its_minimum(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.engine.fp16_enabled = lambda: True
    run.engine._get_optimizer_loss_scale = lambda: 1.0
    assert [run.train(3.0, float("inf"), OVERFLOW) for _ in range(20)] == [None] * 20
    assert [run.train(3.0, float("inf"), AT_MINIMUM) for _ in range(2)] == [None] * 2
    with pytest.raises(GuardError, match=r"^step 23: .* overflowed in 3 steps in a row .*loss scale of 1 cannot"):
        run.train(3.0, float("inf"), AT_MINIMUM)
    assert run.events()[-1]["event"] == "stop"
    assert run.events()[-1]["exit_code"] == 76


def test_losses_of_nan_between_overflows_are_rolled_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(3.0, float("inf"), AT_MINIMUM)
    run.train(float("nan"), float("inf"), NAN)
    assert run.train(3.0, float("inf"), OVERFLOW) is None, "neither good nor bad"
    assert run.train(float("nan"), float("inf"), NAN) is not None
