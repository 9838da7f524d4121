"""Count the bytes of all living tensors, and their peak, with a dispatch mode; also of fake tensors without memory."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


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
