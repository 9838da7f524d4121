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
    assert timers.take_ms() == {"forward": 30, "backward": 60, "reduce": 30, "optimizer": 30, "wait": 0, "other": 20}
    assert device.waits > 0
    assert timers.take_ms() == {"forward": 0, "backward": 0, "reduce": 0, "optimizer": 0, "wait": 0, "other": 10}


def test_all_of_the_time_is_in_a_phase_or_excluded() -> None:
    device = Device()
    timers = PhaseTimers(device.event)
    train(timers, 1)
    with timers.paused():
        assert not timers.begin_wait()
        device.time_ms += 1000
    timers.take_ms()
    begin = device.time_ms
    device.time_ms += 500  # outside of a step
    assert timers.begin_wait()
    timers.end_wait()
    train(timers, 1)
    with timers.paused():
        device.time_ms += 1000
    taken = timers.take_ms()
    assert sum(taken.values()) == device.time_ms - begin - 1010
    assert taken["other"] > 500
    assert timers.waited_ms["other"] == 10


def test_events_are_used_again() -> None:
    device = Device()
    timers = PhaseTimers(device.event)
    for _ in range(100):
        train(timers, 3)
        device.completed = device.time_ms - 20  # the host is two events ahead
    assert device.made < 40
    assert timers.take_ms()["forward"] == 100 * 3 * 10
    assert device.waits <= 4


def test_waiting_for_others_is_a_part_of_its_phase() -> None:
    device = Device()
    timers = PhaseTimers(device.event)
    assert not timers.begin_wait()  # no phase
    with timers.training_step():
        timers.enter(FORWARD)
        assert timers.begin_wait()
        assert not timers.begin_wait()  # an operation inside of another
        timers.end_wait()
        timers.enter(OPTIMIZER)
    assert timers.take_ms()["forward"] == 30
    assert timers.waited_ms == {"forward": 10, "backward": 0, "reduce": 0, "optimizer": 0, "wait": 0, "other": 0}
    timers.take_ms()
    assert set(timers.waited_ms.values()) == {0}
