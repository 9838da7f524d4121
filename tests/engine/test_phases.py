"""Phase timers with events of a device that lags behind, and the update of a sample of the weights."""

import types

import pytest
import torch

from pretrain.engine.measure import update_size
from pretrain.engine.measure.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, PhaseTimers
from pretrain.engine.measure.update_size import SAMPLE_ELEMENTS, UpdateSize, _stride


class Device:
    """A device that records an event every 10 ms, and completes events only when it is asked to."""

    def __init__(self) -> None:
        self.time_ms, self.completed, self.made, self.waits = 0, 0, 0, 0

    def event(self) -> "Event":
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._time_ms = device, 0

    def record(self) -> None:
        self._device.time_ms += 10
        self._time_ms = self._device.time_ms

    def query(self) -> bool:
        return self._time_ms <= self._device.completed

    def synchronize(self) -> None:
        self._device.waits += not self.query()
        self._device.completed = max(self._device.completed, self._time_ms)

    def elapsed_time(self, end_event: "Event") -> float:
        assert end_event.query()
        return end_event._time_ms - self._time_ms


def train(timers: PhaseTimers, micro_batches: int) -> None:
    with timers.training_step():
        for _ in range(micro_batches):
            for phase in (FORWARD, BACKWARD, REDUCE, BACKWARD, OPTIMIZER):
                timers.enter(phase)


def test_times_are_read_without_waiting_until_they_are_taken() -> None:
    device = Device()
    timers = PhaseTimers(device.event)
    timers.enter(FORWARD)  # an evaluation: no training step
    train(timers, 2)
    train(timers, 1)
    assert device.waits == 0
    assert timers.take_ms() == {"forward": 30, "backward": 60, "reduce": 30, "optimizer": 30, "wait": 0}
    assert device.waits > 0
    assert set(timers.take_ms().values()) == {0}


def test_events_are_used_again() -> None:
    device = Device()
    timers = PhaseTimers(device.event)
    for _ in range(100):
        train(timers, 3)
        device.completed = device.time_ms - 20  # the host is two events ahead
    assert device.made < 40
    assert timers.take_ms()["forward"] == 100 * 3 * 10
    assert device.waits <= 4


@pytest.mark.parametrize("elements", [1, SAMPLE_ELEMENTS, SAMPLE_ELEMENTS + 1, 3 * SAMPLE_ELEMENTS, 10**10])
def test_the_sample_of_weights_is_small_and_its_stride_odd(elements: int) -> None:
    stride = _stride(elements)
    assert stride % 2 == 1
    assert elements / stride <= SAMPLE_ELEMENTS
    assert stride == 1 or elements / (stride - 2) > SAMPLE_ELEMENTS


@pytest.mark.parametrize("sample", [10**6, 4000])
def test_a_sample_has_the_relative_update_of_all_weights(sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices have different sizes of weights and updates, and each column other weights."""
    monkeypatch.setattr(update_size, "SAMPLE_ELEMENTS", sample)
    numbers = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(100, 64, generator=numbers) * torch.arange(1, 65) for scale in (0.1, 1.0, 3.0)]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for number, weight in enumerate(weights):
        weight.grad = torch.randn(weight.shape, generator=numbers) * (number + 1)
    before = torch.cat([weight.flatten() for weight in weights])
    engine = types.SimpleNamespace(optimizer=optimizer, device=torch.device("cpu"))
    due = [True, False]
    measured = UpdateSize(engine, lambda: [weight.view(-1) for weight in weights],  # type: ignore[arg-type]
                          is_due=lambda: due.pop(0))
    engine.optimizer.step()
    after = torch.cat([weight.flatten() for weight in weights])
    squares = measured.take_squares()
    assert float(squares[0].sqrt()) == pytest.approx(float(after.norm()), rel=1e-5)
    ratio = float((squares[1] / squares[2]).sqrt())
    assert ratio == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5 if sample == 10**6 else 0.1)
    engine.optimizer.step()
    assert measured.take_squares().isnan().all()
