"""Count the bytes of all living tensors with a dispatch mode, also of fake ones; find the tensors of an engine."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor or FakeTensor; None for meta tensors and sparse tensors."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all living storages that operators returned since the mode was entered.

    Tensors that share a storage count once. A storage that is older than the mode counts after the first operator that
    returns a view of it. Enter the mode before anything is built, or call `add` for each existing tensor.
    """

    def __init__(self) -> None:
        import torch._dynamo  # takes a second; torch would import it inside the mode, which fails under zero.Init

        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sizes: dict[int, int] = {}  # identity of a storage -> bytes
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it is freed. A storage that was resized counts with its new size."""
        storage = storage_of(tensor)
        if storage is None:
            return
        key, size = storage._cdata, storage.nbytes()
        if size == self.sizes.get(key, 0):
            return
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self.live_bytes += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        self.live_bytes -= self.sizes.pop(key, 0)

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are alive now."""
        self.peak_bytes = self.live_bytes


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


def call_after_backward(engine: "DeepSpeedEngine", action: Callable[[], None]) -> None:
    """Call `action` in every later step after the last backward pass.

    At ZeRO stages 0 and 1, a pipeline engine and a plain one (with sequence or expert parallelism) call `action` before
    they reduce gradients. At stages 2 and 3 the backward pass reduces, and `action` is called before the step.
    """
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if isinstance(engine, PipelineEngine):
        original_reduce = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def reduce_tied_grads(self: "PipelineEngine") -> None:
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
