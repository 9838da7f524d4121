"""Digests of what one training step computes, by layer, and the steps that have them.

They are checksums of outputs, of gradients of outputs and of parameters before the reduction, and of the reduced
gradients; inside the layers, of outputs of operators and their gradients. Hooks that exist in the recorded steps only
compute them. They change no value, and do not wait for the device. With --flight_interval auto, the first steps of a
start are measured, and all ranks agree on an interval that follows from the cost.
"""

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from pretrain.callback import UpdatePart
from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import checksum, combined_checksum, reduced_gradients
from pretrain.engine.examine import add_hooks, layer_of, layers_of, operators_of
from pretrain.engine.phases import new_event
from pretrain.engine.update import REDUCED_DIGEST

_PREVIOUS = 3  # factor of the checksum of the micro-batches before: odd, so that no bit is lost modulo 2^64
LARGEST_COST = 0.002  # fraction of the time of a step
_LEAST_FOR_ALL_KEYS = 0.0005  # fraction of the time of a step, if the keys of each step alone cost nearly as much
_FULL = (3, 5)  # steps of this start with all keys; the first one is not measured: it allocates memory
_DECIDED_AFTER = 8  # steps of this start; the others up to here are measured without these keys


class CostTimer:
    """Adds up the time that a part of the step takes: the longer one of the host's and the device's time."""

    def __init__(self) -> None:
        self._host_ms = 0.0
        self._marks: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the block. Does not wait for the device."""
        start, end, began = new_event(), new_event(), time.perf_counter()
        start.record()
        yield
        end.record()
        self._marks.append((start, end))
        self._host_ms += (time.perf_counter() - began) * 1e3

    def take_ms(self) -> float:
        """Return the milliseconds since the last call. Waits for the device."""
        for _, end in self._marks[-1:]:
            end.synchronize()
        device_ms = sum(start.elapsed_time(end) for start, end in self._marks)
        host_ms, self._host_ms, self._marks = self._host_ms, 0.0, []
        return max(host_ms, device_ms)


class LayerDigests:
    """Takes the digests of this rank's layers in the steps between `begin` and `end`.

    A layer that is recomputed in the backward pass is digested when it is computed for the first time. The loss, which
    the head returns, is no output here: of the module of a tied head, the output as an embedding counts.
    """

    def __init__(self, engine: DeepSpeedEngine, cost: CostTimer) -> None:
        self._engine, self._cost = engine, cost
        parameters = [layer_of(name) for name, _ in engine.module.named_parameters()]
        self.names = list(dict.fromkeys([*layers_of(engine.module), *parameters]))  # this rank's layers, in order
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Add the hooks for the next step."""
        device, count = self._engine.device, len(self.names)
        self._sums = {key: list(torch.zeros(count, dtype=torch.int64, device=device).unbind())
                      for key in ("layers_forward", "layers_backward", "gradient_bits")}
        self._squares = list(torch.zeros(count, dtype=torch.float64, device=device).unbind())
        self._operators: dict[str, dict[str, torch.Tensor]] = {"operators_forward": {}, "operators_backward": {}}
        self._last: Any = None
        self._hooks = [*add_hooks(self._engine.module, self._of_output, self._of_gradient),
                       *(each.register_forward_hook(partial(self._of_operator, name))
                         for name, each in operators_of(self._engine.module).items())]

    def operators(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the digests of operators: key in a row -> name -> value, in the order of the computation."""
        return {key: sums for key, sums in self._operators.items() if sums}

    def end(self) -> dict[str, torch.Tensor]:
        """Remove the hooks. Return the digests by their keys in a row, one value a layer, on the device."""
        self._last = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return {**{key: torch.stack(values) for key, values in self._sums.items()},
                "gradients": torch.stack(self._squares).sqrt()}

    def _add(self, key: str, layer: str, tensor: torch.Tensor) -> None:
        with self._cost.measured(), torch.no_grad():
            sums, index = self._sums[key], self.names.index(layer)
            sums[index] = sums[index] * _PREVIOUS + checksum(tensor)

    def _is_first_pass(self) -> bool:
        is_repeated = torch._C._current_graph_task_id() != -1 or attachments(self._engine).recomputes  # in a backward
        return not is_repeated and self._engine.module.training

    def _of_operator(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if not self._is_first_pass() or output is self._last:  # the last one inside of an operator has the same output
            return
        self._last = output
        for tensor in (output,) if torch.is_tensor(output) else output if isinstance(output, tuple) else ():
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                self._add_operator("operators_forward", name, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._add_operator, "operators_backward", name))

    def _add_operator(self, key: str, name: str, tensor: torch.Tensor) -> None:
        with self._cost.measured(), torch.no_grad():
            sums, value = self._operators[key], checksum(tensor)
            sums[name] = sums[name] * _PREVIOUS + value if name in sums else value

    def _of_output(self, layer: str, output: torch.Tensor) -> None:
        if not self._is_first_pass() or output.dim() == 0:
            return
        self._add("layers_forward", layer, output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._add("layers_backward", layer, gradient))

    def _of_gradient(self, parameter: str, gradient: torch.Tensor) -> None:
        if attachments(self._engine).recomputes:
            return
        self._add("gradient_bits", layer_of(parameter), gradient)
        with self._cost.measured(), torch.no_grad():
            index = self.names.index(layer_of(parameter))
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            self._squares[index] = self._squares[index] + norm.double().square()


class ReducedDigest(UpdatePart):
    """Takes the checksum of this rank's part of the reduced gradients, before clipping, in steps that are due."""

    order = REDUCED_DIGEST

    def __init__(self, engine: DeepSpeedEngine, cost: CostTimer) -> None:
        self._engine, self._cost = engine, cost
        self.is_due = False
        self._sum: torch.Tensor | None = None

    def before_update(self) -> None:
        if self.is_due:
            with self._cost.measured(), torch.no_grad():
                self._sum = combined_checksum(reduced_gradients(self._engine), self._engine.device)

    def take(self) -> torch.Tensor | None:
        """Return the checksum of the last step: a scalar on the device; None if there was no update."""
        taken, self._sum, self.is_due = self._sum, None, False
        return taken


class FlightInterval:
    """Says which steps have all keys, and chooses the interval.

    Args:
        given: --flight_interval; None: auto.
    """

    def __init__(self, given: int | None, device: torch.device) -> None:
        self.steps = given  # None: not chosen yet
        self.measured_ms: dict[str, float] = {}  # see Header.measured_ms
        self._cost_ms = 0.0  # time of the keys of the interval, in a step that has them
        self._device = device
        self._trained = 0
        self._cheap_ms: list[float] = []  # cost of the other keys
        self._step_ms: list[float] = []  # steps without the keys of the interval

    def is_full(self, step: int) -> bool:
        """Return whether the next step has all keys. `step`: its number; call it once for each step."""
        self._trained += 1
        return self._trained in _FULL if self.steps is None else step % self.steps == 0

    @property
    def is_measured(self) -> bool:
        """True during a step whose cost is to be measured."""
        return self.steps is None and self._trained == _FULL[-1]

    def observe(self, *, step_ms: float, cost_ms: float, is_full: bool) -> bool:
        """Add a step. Returns whether the interval has just been chosen; then collective."""
        if self.steps is not None:
            return False
        if self.is_measured:
            self._cost_ms = cost_ms
        elif self._trained > _FULL[0] and not is_full:
            self._step_ms.append(step_ms)
            self._cheap_ms.append(cost_ms)
        if self._trained < _DECIDED_AFTER:
            return False
        own = [self._cost_ms, median(self._cheap_ms), -median(self._step_ms)]
        worst = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        cost_ms, cheap_ms, negative_step_ms = (round(value, 3) for value in worst.tolist())
        self.measured_ms = {"step": -negative_step_ms, "each_step": cheap_ms, "interval": cost_ms}
        self.steps = interval_for(cost_ms, cheap_ms, -negative_step_ms)
        return True


def interval_for(cost_ms: float, cheap_ms: float, step_ms: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20 ... with which all keys cost at most LARGEST_COST of the time.

    Args:
        cost_ms: of the keys of the interval, in a step that has them.
        cheap_ms: of the other keys, in each step.
        step_ms: time of a step.
    """
    rest_ms = max(LARGEST_COST * step_ms - cheap_ms, _LEAST_FOR_ALL_KEYS * step_ms)
    power = 1
    while True:
        for digit in (1, 2, 5):
            if cost_ms <= rest_ms * digit * power:
                return digit * power
        power *= 10
