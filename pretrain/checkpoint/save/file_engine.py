"""DeepSpeed's checkpoint engine with our files under it: hashed while they are written, unpickled without running."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from pretrain.checkpoint.format.pickles import load_pickle, without_enums


class Writable(Protocol):
    """What `torch.save` needs of a file."""

    def write(self, data: bytes | memoryview, /) -> int: ...

    def flush(self) -> None: ...


OpenFile = Callable[[Path], AbstractContextManager[Writable]]


class FileEngine(CheckpointEngine):
    """Takes the place of `engine.checkpoint_engine`; `open_file` says where the bytes of a path go.

    `save` never raises: the other ranks wait in DeepSpeed's barriers. What went wrong stands in `error`, and nothing
    is written after it.
    """

    def __init__(self, open_file: OpenFile | None = None) -> None:
        super().__init__()
        self.name = "ds-pretrain"
        self.error: str | None = None
        self._open_file = open_file

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to do: the folder is there."""

    def save(self, state_dict: Any, path: str) -> None:
        self.write(Path(path), lambda file: save(state_dict, file))

    def write(self, path: Path, fill: Callable[[Writable], object]) -> None:
        """Let `fill` write the file at `path`."""
        if self.error is not None:
            return
        assert self._open_file is not None, "an engine for loading"
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the manifest's SHA-256 does more
        try:
            with self._open_file(path) as file:
                fill(file)
        except (OSError, RuntimeError) as error:  # torch's zip writer turns an OSError of `write` into a RuntimeError
            self.error = f"{path.name}: {_cause(error)}"
        finally:
            torch.serialization.set_crc32_options(crc32)

    def load(self, path: str, map_location: Any = None) -> Any:
        return load_pickle(Path(path))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True


def save(value: Any, file: Writable) -> None:
    """`torch.save` of what every supported Python reads back; its type hints ask for more of a file than it uses."""
    torch.save(without_enums(value), file)  # type: ignore[arg-type]


def _cause(error: BaseException) -> str:
    """The first error of a chain, in one line: what came after it is its consequence."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
