"""A checkpoint engine for DeepSpeed: files are hashed while they are written, and loading them runs no code."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from pretrain.checkpoint.format.pickles import load_pickle, without_enums


class Writable(Protocol):
    """The methods of a file that `torch.save` calls."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


OpenFile = Callable[[Path], AbstractContextManager[Writable]]


class FileEngine(CheckpointEngine):
    """Replacement for `engine.checkpoint_engine`. `open_file` opens the file that receives the bytes of a path.

    `save` never raises, because the other ranks wait in DeepSpeed's barriers. The first error is kept in `error`, and
    nothing is written after it.
    """

    def __init__(self, open_file: OpenFile | None = None) -> None:
        super().__init__()
        self.name = "ds-pretrain"
        self.error: str | None = None
        self._open_file = open_file

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing, because the folder exists already."""

    def save(self, state_dict: Any, path: str) -> None:
        self.write(Path(path), lambda file: save_pickle(state_dict, file))

    def write(self, path: Path, fill: Callable[[Writable], object]) -> None:
        """Let `fill` write the file at `path`."""
        if self.error is not None:
            return
        assert self._open_file is not None, "this engine was created for loading"
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the manifest has a SHA-256 instead
        try:
            with self._open_file(path) as file:
                fill(file)
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError when `write` raised OSError
            self.error = f"{path.name}: {_cause(error)}"
        finally:
            torch.serialization.set_crc32_options(crc32)

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_pickle(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def save_pickle(value: Any, file: Writable) -> None:
    """Write `value` with torch.save, so that every supported Python can load it."""
    torch.save(without_enums(value), file)  # type: ignore[arg-type] # torch.save calls only `write` and `flush`


def _cause(error: BaseException) -> str:
    """Return the first error of a chain of exceptions, in one line."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
