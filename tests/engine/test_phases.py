"""Phase timers with events of a device that lags behind."""



from pretrain.engine.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, PhaseTimers


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
