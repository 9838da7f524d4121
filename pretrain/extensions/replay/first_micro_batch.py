"""Checksums of what a rank computes for the first micro-batch of a training step, and the same computation again.

A pipeline stage computes its part from the activations that it received, and from the gradient of its output.
Computing again changes nothing that the training uses. torch.autograd.grad accumulates no gradients, so that the hooks
with which DeepSpeed reduces them do not run. Random states and statistics are put back.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from pretrain.engine.attachments import attachments
from pretrain.engine.checksums import checksum
from pretrain.engine.examine import add_hooks, first_tensor, layer_of, layers_of

FORWARD, BACKWARD = "forward", "backward"


class Place(NamedTuple):
    """Place of a checksum."""

    direction: str  # FORWARD or BACKWARD
    layer: str  # whose pass computed the value, such as "layer 3 (Block)"
    value: str  # such as "its output"


@dataclass(frozen=True)
class Captured:
    """The first micro-batch of a step on this rank: what it was computed from, and what was computed."""

    inputs: tuple[torch.Tensor, ...]  # inputs of the module
    labels: tuple[torch.Tensor, ...]  # and weights, on the last pipeline stage; otherwise empty
    seed: torch.Tensor  # gradient with which the backward pass begins
    random: tuple[torch.Tensor, ...]  # states of the random generators before the forward pass, in host memory
    sums: torch.Tensor  # int64, checksums in the order of `FirstMicroBatch.places`

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors, in the order that `from_tensors` expects."""
        return [*self.inputs, *self.labels, self.seed, *self.random, self.sums]

    def from_tensors(self, tensors: list[torch.Tensor]) -> "Captured":
        """Return a micro-batch of the same form with these tensors."""
        rest = iter(tensors)
        inputs, labels = (tuple(itertools.islice(rest, len(part))) for part in (self.inputs, self.labels))
        return Captured(inputs, labels, next(rest), tuple(x.cpu() for x in itertools.islice(rest, len(self.random))),
                        next(rest))


@dataclass
class _Recorder:
    """Checksums of one micro-batch: of outputs in the order of the calls, and of gradients."""

    in_forward: bool = False
    in_backward: bool = False
    layers: list[str] = field(default_factory=list)  # in the order of their calls
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[int | str, torch.Tensor] = field(default_factory=dict)  # by number of the call or parameter name

    def output(self, layer: str, tensor: torch.Tensor) -> None:
        """Add the output of a layer, and later the gradient that arrives at it."""
        number = len(self.layers)
        self.layers.append(layer)
        self.outputs.append(checksum(tensor))
        at_gradient(tensor, lambda grad: self.gradient(number, grad))

    def gradient(self, key: int | str, grad: torch.Tensor | None) -> None:
        if self.in_backward and grad is not None and key not in self.gradients:
            self.gradients[key] = checksum(grad)


_INPUT = -1  # key of the gradient with respect to the input of a pipeline stage


def at_gradient(tensor: torch.Tensor, action: Callable[[torch.Tensor | None], None]) -> None:
    """Call `action` with the gradient of a tensor that is no leaf, when its backward pass begins.

    A hook of the node sees what the hooks of the tensor leave: DeepSpeed scales the gradient of the loss by one
    (DeepSpeed 0.19.8, runtime/engine.py, _backward_prologue_per_tensor).
    """
    if tensor.grad_fn is not None:
        number = tensor.output_nr
        tensor.grad_fn.register_prehook(lambda grads: action(grads[number]))


class FirstMicroBatch:
    """Records the first micro-batch of a step, and computes such a micro-batch again."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._module: Any = engine.module
        self._is_stage = isinstance(engine.module, PipelineModule)
        self._has_loss = self._is_stage and engine.is_last_stage()
        self._parameters = {name: weight for name, weight in engine.module.named_parameters() if weight.requires_grad}
        self._open = contextlib.ExitStack()
        self.places: list[Place] = []  # known once a micro-batch has been recorded

    def watch(self) -> None:
        """Record the first micro-batch of the step that begins now. The next `take` returns it."""
        self._open.close()  # a step has failed
        self._recorder, self._number, self._parts = _Recorder(), 0, dict[str, Any](labels=())
        self._open.enter_context(self._recorded(self._recorder, keeps_gradients=True))
        handles = [self._module.register_forward_pre_hook(self._before_forward),
                   self._module.register_forward_hook(self._after_forward)]
        for handle in handles:
            self._open.callback(handle.remove)
        if self._has_loss:
            loss_of_hidden = self._module.loss_fn
            self._open.callback(setattr, self._module, "loss_fn", loss_of_hidden)
            self._module.loss_fn = lambda x, labels: self._watched_loss(loss_of_hidden, x, labels)

    def take(self) -> Captured:
        """Return the first micro-batch since `watch`, and record no longer."""
        self._open.close()
        recorder, parts = self._recorder, self._parts
        if not self.places:
            self.places = self._places(recorder.layers)
        return Captured(parts["inputs"], parts["labels"], parts["seed"], parts["random"], self._sums(recorder))

    def compute(self, given: Captured) -> torch.Tensor:
        """Compute the micro-batch of this or another rank with the same weights, and return its checksums.

        Collective in the group of the ranks that share the model: ZeRO-3, tensor, sequence and expert parallelism.
        """
        recorder = _Recorder()
        with torch.enable_grad(), self._recorded(recorder, keeps_gradients=False), _without_backward_hooks(
                self._module), self._unchanged_state():
            _set_random_states(given.random)
            recorder.in_forward = True
            root, leaves = self._forward(given, recorder)
            recorder.in_forward, recorder.in_backward = False, True
            torch.autograd.grad(root, [*self._parameters.values(), *leaves], given.seed, allow_unused=True)
        return self._sums(recorder)

    def _forward(self, given: Captured, recorder: _Recorder) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the tensor at which the backward pass begins, and the inputs that have a gradient."""
        first, *others = given.inputs
        leaves = []
        if first.is_floating_point():  # activations of the previous pipeline stage
            first = first.detach().requires_grad_()
            leaves = [first]
            first.register_hook(lambda grad: recorder.gradient(_INPUT, grad))
        if not self._is_stage:
            return self._module(first, *others), leaves
        output = self._module((first, *others) if others else first)
        if self._has_loss:
            # loss_fn would scale the gradient a second time (patches/optimizers.py, scale_loss_at_stage_0)
            return self._module.loss_of_hidden(output, given.labels), leaves
        return first_tensor(output), leaves

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._number += 1
        if self._number > 1:
            return
        inputs = args if torch.is_tensor(args[0]) else tuple(args[0])
        self._parts |= {"inputs": inputs, "random": random_states()}
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda grad: self._recorder.gradient(_INPUT, grad))
        self._recorder.in_forward = True

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._recorder.in_forward = False
        if not self._has_loss:
            self._begin_backward_at(first_tensor(output))

    def _watched_loss(self, loss_of_hidden: Callable[..., torch.Tensor], x: torch.Tensor,
                      labels: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self._number == 1:
            self._parts["labels"], self._recorder.in_forward = tuple(labels), True
        loss = loss_of_hidden(x, labels)
        self._recorder.in_forward = False
        self._begin_backward_at(loss)
        return loss

    def _begin_backward_at(self, root: torch.Tensor) -> None:
        """Record gradients in the backward pass of the first micro-batch only: it is the first one, in pipelines too.

        The gradient is copied, because a pipeline stage receives those of all micro-batches in the same memory.
        """
        recorder, number, parts = self._recorder, self._number, self._parts

        def begin(grad: torch.Tensor | None) -> None:
            recorder.in_backward = number == 1
            if number == 1 and grad is not None:
                parts["seed"] = grad.detach().clone()

        if root.grad_fn is not None:
            nodes_output = root.output_nr
            root.grad_fn.register_prehook(lambda grads: begin(grads[nodes_output]))

    @contextlib.contextmanager
    def _recorded(self, recorder: _Recorder, *, keeps_gradients: bool) -> Iterator[None]:
        """Let hooks record the layers and the gradients of the parameters.

        Without `keeps_gradients`, those of the parameters are freed as soon as their checksums are known: one value
        takes their place, so that all of them together take no memory.
        """
        labels = {name: f"layer {name} ({type(layer).__name__})" for name, layer in layers_of(self._module).items()}

        def of_output(layer: str, output: torch.Tensor) -> None:
            if recorder.in_forward:  # and not in a backward pass that computes activations again
                recorder.output(labels[layer], output)

        def of_gradient(name: str, grad: torch.Tensor) -> torch.Tensor | None:
            recorder.gradient(name, grad)
            return None if keeps_gradients else grad.new_zeros(()).expand(grad.shape)

        handles = add_hooks(self._module, of_output, of_gradient)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _places(self, layers: list[str]) -> list[Place]:
        """Return the places of all checksums in the order of the computation, for layers in the order of the calls."""
        places = [Place(FORWARD, layer, "its output") for layer in layers]
        self._gradient_keys: list[int | str] = []
        for number in range(len(layers) - 1, -1, -1):
            layer = layers[number]
            if layers.index(layer) == number:  # the gradient of a tied matrix is complete at its first use
                for name in self._parameters:
                    if layer_of(name) == layer.split(" ")[1]:
                        places.append(Place(BACKWARD, layer, f"the gradient of {name}"))
                        self._gradient_keys.append(name)
            places.append(Place(BACKWARD, layer, "the gradient of its input"))
            self._gradient_keys.append(number - 1)  # key of the previous layer's output, or _INPUT
        return places

    def _sums(self, recorder: _Recorder) -> torch.Tensor:
        """Return the checksums in the order of `places`; 0 where there is no gradient."""
        none = torch.zeros((), dtype=torch.int64, device=self._engine.device)
        sums = [*recorder.outputs, *(recorder.gradients.get(key, none) for key in self._gradient_keys)]
        return torch.stack([value.to(none.device) for value in sums])

    @contextlib.contextmanager
    def _unchanged_state(self) -> Iterator[None]:
        """Put back what a forward and backward pass changes: random states, and statistics of losses and routers."""
        own, random = attachments(self._engine), random_states()
        kept = [(holder, dict(vars(holder))) for holder in (self._module.training_loss, self._module.router_losses)
                if holder is not None]
        for holder, values in kept:
            vars(holder).update({name: dict(value) for name, value in values.items() if isinstance(value, dict)})
        own.recomputes = True
        try:
            yield
        finally:
            own.recomputes = False
            _set_random_states(random)
            for holder, values in kept:
                vars(holder).update(values)


@contextlib.contextmanager
def _without_backward_hooks(module: nn.Module) -> Iterator[None]:
    """Leave out the backward hooks of modules. With them, DeepSpeed reduces the gradients of ZeRO-3's leaf modules.

    DeepSpeed 0.19.8 (runtime/zero/stage3.py, reduce_leaf_module_grads) would add zeros to them once more.
    """
    hooked = [(each, each._backward_hooks) for each in module.modules() if each._backward_hooks]
    for each, _ in hooked:
        each._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for each, hooks in hooked:
            each._backward_hooks = hooks


def random_states() -> tuple[torch.Tensor, ...]:
    """Return the states of the random generators of the host and of the device, in host memory."""
    accelerator = get_accelerator()
    own = () if accelerator.device_name() == "cpu" else (accelerator.get_rng_state(),)
    return torch.get_rng_state(), *own


def _set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        get_accelerator().set_rng_state(states[1])
