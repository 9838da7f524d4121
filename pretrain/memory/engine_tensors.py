"""The tensors that an engine of DeepSpeed holds, and a call between the backward pass and the optimizer's step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine


def walk_tensors(root: object) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield (path of attribute names, tensor) for all tensors that DeepSpeed's objects and containers hold."""
    seen, waiting = {id(root)}, [((), root)]  # type: tuple[set[int], list[tuple[tuple[str, ...], Any]]]
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, torch.Tensor):
            yield path, node
            if node.is_leaf and node.grad is not None:
                yield (*path, "grad"), node.grad
        for name, part in _children(node):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(((*path, name) if name else path, part))


def _children(node: Any) -> Iterable[tuple[str, Any]]:
    """Return (name, value) of the items of a container and of the attributes of an object of DeepSpeed or torch."""
    if isinstance(node, Mapping):
        return [("", part) for part in node.values()]
    if isinstance(node, (str, bytes, int, float, type)) or node is None:
        return []
    items = [("", part) for part in node] if isinstance(node, (list, tuple, set, frozenset)) or \
        type(node).__name__ == "deque" else []
    has_tensors = isinstance(node, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)) or \
        type(node).__module__.split(".")[0] in ("deepspeed", "pretrain")
    return [*items, *vars(node).items()] if has_tensors and hasattr(node, "__dict__") else items


def call_after_backward(engine: DeepSpeedEngine, action: Callable[[], None]) -> None:
    """Call `action` in every later step after the last backward pass.

    At ZeRO stages 0 and 1, a pipeline engine and a plain one (with sequence or expert parallelism) call `action` before
    they reduce gradients. At stages 2 and 3 the backward pass reduces, and `action` is called before the step.
    """
    if isinstance(engine, PipelineEngine):
        original_reduce = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def reduce_tied_grads(self: PipelineEngine) -> None:
            action()
            original_reduce(self)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: reduce_tied_grads}
        return
    if engine.zero_optimization_stage() < 2:
        original_allreduce = engine.allreduce_gradients

        def allreduce_gradients(*args: Any, **kwargs: Any) -> None:
            if engine.is_gradient_accumulation_boundary():
                action()
            original_allreduce(*args, **kwargs)

        engine.allreduce_gradients = allreduce_gradients
        return
    original_step = engine._take_model_step

    def take_model_step(*args: Any) -> None:
        action()
        original_step(*args)

    engine._take_model_step = take_model_step
