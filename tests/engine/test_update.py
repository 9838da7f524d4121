"""The order of an update's parts, and statistics of a few steps, with fake engines."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.utils import is_invalid_grad_norm

from pretrain.callback import UpdatePart
from pretrain.engine import update_statistics
from pretrain.engine.attachments import Attachments, attach
from pretrain.engine.update import Update
from pretrain.engine.update_statistics import SAMPLE_ELEMENTS, GradientStats, _stride, measure_updates


class Part(UpdatePart):
    """Records its calls. The norm comes from the fake optimizer's step."""

    def __init__(self, name: str, calls: list[str], order: float, *, reads_norm: bool = False,
                 veto: bool = False) -> None:
        self._name, self._calls, self.order, self.reads_norm, self._veto = name, calls, order, reads_norm, veto

    def before_update(self) -> None:
        self._calls.append(f"before {self._name}")

    def rejects(self, scaled_norm: torch.Tensor) -> bool:
        self._calls.append(f"{self._name} reads {float(scaled_norm)}")
        return self._veto

    def after_update(self) -> None:
        self._calls.append(f"after {self._name}")


class Optimizer:
    """Checks its norm by the function of its module, as DeepSpeed's optimizers do."""

    def __init__(self, norm: float) -> None:
        self.norm, self.calls = torch.tensor(norm), list[str]()

    def step(self, closure: None = None) -> str:
        self.overflow = is_invalid_grad_norm(self.norm)
        self.calls.append(f"step {closure}")
        return "result"


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_run_in_their_order_whenever_they_are_set(reverse: bool) -> None:
    engine: Any = SimpleNamespace(optimizer=Optimizer(2.0), get_lr=lambda: [1e-3])
    update, calls = Update(engine), engine.optimizer.calls
    names = ["guard", "size", "noise_scale", "adaptive_clipping", "value_clipping", "growing_scale", "unscaled_norm"]
    for name in sorted(names, reverse=reverse):
        update.add(Part(name, calls, names.index(name), reads_norm=name in ("guard", "adaptive_clipping")))
    assert engine.optimizer.step("closure") == "result"
    assert calls == [*(f"before {name}" for name in names), "guard reads 2.0", "adaptive_clipping reads 2.0",
                     "step closure", *(f"after {name}" for name in reversed(names))]


@pytest.mark.parametrize(("norm", "veto", "read"), [(2.0, False, ["guard", "adaptive_clipping"]),
                                                    (2.0, True, ["guard"]), (math.nan, False, [])])
def test_a_norm_is_read_until_it_is_rejected(norm: float, veto: bool, read: list[str]) -> None:
    engine: Any = SimpleNamespace(optimizer=Optimizer(norm), get_lr=lambda: [1e-3])
    update, calls = Update(engine), engine.optimizer.calls
    update.add(Part("adaptive_clipping", calls, 2, reads_norm=True))
    update.add(Part("guard", calls, 1, reads_norm=True, veto=veto))
    engine.optimizer.step()
    assert [call.split()[0] for call in calls if "reads" in call] == read
    assert engine.optimizer.overflow == (veto or math.isnan(norm))
    assert (update.rejected_norm is not None) == veto
    assert sys.modules[__name__].__dict__["is_invalid_grad_norm"] is is_invalid_grad_norm, "outside of the step"


def fake_engine(limit: float) -> SimpleNamespace:
    engine = SimpleNamespace(device=torch.device("cpu"), norm=None, optimizer=SimpleNamespace(overflow=False),
                             gradient_clipping=lambda: limit,
                             ds_pretrain=SimpleNamespace(update=SimpleNamespace(find=lambda kind: None)))
    engine.get_global_grad_norm = lambda: engine.norm
    return engine


def test_skipped_updates_count_as_steps_but_neither_as_norms_nor_as_clipped():
    engine = fake_engine(1.0)
    stats = GradientStats(engine)
    for norm, skipped in ((torch.tensor(0.5), False), (torch.tensor(2.0), False), (float("inf"), True),
                          (torch.tensor(9.0, dtype=torch.float64), True)):  # the last one: a veto
        engine.norm, engine.optimizer.overflow = norm, skipped
        stats.observe()
    assert stats.take() == {"grad_norm_max": 9.0, "clip_norm": 1.0, "clip_rate": 0.25}
    for value in (0.5, 2.0, math.inf, 0.5):  # the third one: the device skips the update, and the host does not know
        engine.norm, engine.optimizer.overflow = torch.tensor(value), False
        stats.observe()
    assert stats.take() == {"grad_norm_max": 2.0, "clip_norm": 1.0, "clip_rate": 0.25}
    assert stats.take() == {"grad_norm_max": None, "clip_norm": 1.0, "clip_rate": None}


def test_without_clipping_there_is_neither_a_limit_nor_a_rate():
    engine = fake_engine(0.0)
    stats = GradientStats(engine)
    engine.norm = torch.tensor(3.0)
    stats.observe()
    assert stats.take() == {"grad_norm_max": 3.0, "clip_norm": None, "clip_rate": None}
    engine.norm = torch.tensor(math.nan)  # possible with "check_grad_overflow": false
    stats.observe()
    assert stats.take()["grad_norm_max"] is None


@pytest.mark.parametrize("elements", [1, SAMPLE_ELEMENTS, SAMPLE_ELEMENTS + 1, 3 * SAMPLE_ELEMENTS, 10**10])
def test_the_sample_of_weights_is_small_and_its_stride_odd(elements: int) -> None:
    stride = _stride(elements)
    assert stride % 2 == 1
    assert elements / stride <= SAMPLE_ELEMENTS
    assert stride == 1 or elements / (stride - 2) > SAMPLE_ELEMENTS


@pytest.mark.parametrize("sample", [10**6, 4000])
def test_a_sample_has_the_relative_update_of_all_weights(sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices have different sizes of weights and updates, and each column other weights."""
    monkeypatch.setattr(update_statistics, "SAMPLE_ELEMENTS", sample)
    numbers = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(100, 64, generator=numbers) * torch.arange(1, 65) for scale in (0.1, 1.0, 3.0)]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for number, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=numbers) * (number + 1)
    before = torch.cat([weight.flatten() for weight in weights])
    engine: Any = SimpleNamespace(optimizer=optimizer, device=torch.device("cpu"), get_lr=lambda: [1e-3])
    attach(engine, Attachments(Update(engine), SimpleNamespace(), [], SimpleNamespace()))
    measured = measure_updates(engine, lambda: [weight.view(-1) for weight in weights])
    measured.is_due = True
    engine.optimizer.step()
    after = torch.cat([weight.flatten() for weight in weights])
    squares = measured.take_squares()
    assert float(squares[0].sqrt()) == pytest.approx(float(after.norm()), rel=1e-5)
    ratio = float((squares[1] / squares[2]).sqrt())
    assert ratio == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5 if sample == 10**6 else 0.1)
    measured.is_due = False
    engine.optimizer.step()
    assert measured.take_squares().isnan().all()
