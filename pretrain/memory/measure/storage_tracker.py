"""The bytes of tensors that are alive, and their peak, over real code.

On CUDA the allocator keeps count itself. On the CPU nothing does, so a dispatch mode sees every tensor that an operator
returns, in the backward pass and in the optimizer too, and counts its storage until the storage dies. It works on
FakeTensors as well, whose storages have a size and no memory.

Not seen: what an operator allocates inside and frees again (packed matrices of oneDNN, the working memory of attention
and softmax), DeepSpeed's shared memory for collectives (66 MiB a rank, fixed), and everything that is no tensor. The
process's resident memory, `process.resident_bytes`, holds those too.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageTracker(TorchDispatchMode):
    """Counts bytes of the storages that operators returned since it was entered and that are still alive.

    Of several tensors on one storage the storage counts once; one that was there before counts from the first operator
    that returns a view of it, so enter it before anything is built, or `add` what there is.
    """

    def __init__(self) -> None:
        import torch._dynamo  # takes a second; inside the mode torch would import it, which fails under zero.Init

        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.sizes: dict[int, int] = {}  # by storage
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage until it dies; its new size where it is counted already and was resized."""
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
        """Let the peak begin anew, at what is alive now."""
        self.peak_bytes = self.live_bytes


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory behind a tensor, or what would be behind a FakeTensor; None for meta tensors and sparse ones."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage()


@contextlib.contextmanager
def peak_of(device_type: str, tracker: StorageTracker | None) -> Iterator[dict[str, int]]:
    """Peak bytes while the block runs, filled into the dictionary at its end.

    On CUDA {"peak_bytes", "reserved_bytes"} of the caching allocator (torch.cuda.max_memory_allocated and _reserved);
    elsewhere {"peak_bytes"} of the tracker, which must be entered.
    """
    peaks: dict[str, int] = {}
    if device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    elif tracker is not None:
        tracker.reset_peak()
    yield peaks
    if device_type == "cuda":
        torch.cuda.synchronize()
        peaks.update(peak_bytes=torch.cuda.max_memory_allocated(), reserved_bytes=torch.cuda.max_memory_reserved())
    elif tracker is not None:
        peaks.update(peak_bytes=tracker.peak_bytes)
