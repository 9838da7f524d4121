"""Hashes of every byte of a .bin file, block by block, PREFIX.sha256.json, which holds them, and a process that hashes.

    python pretrain/child.py pretrain.data.token_files.hashes DESCRIPTOR FIRST_BLOCK NUM_BLOCKS [DESCRIPTOR_OF_THE_IDX]

hashes a .bin file with low priority, next to a training run: a thread of the training process would compete for the
GIL, and a preempted thread that holds the GIL would stop the training. Therefore this module imports neither numpy nor
torch. The process prints one line per block: its number and its SHA-256. If it hashes an .idx, this line comes first:
idx and its SHA-256. It ends when its stdin is closed, also if the training process was killed.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from pretrain.child import child_command
from pretrain.errors import reason_of
from pretrain.paths import replace_file, write_synced
from pretrain.stored_json import build, parse_json, read_text

BLOCK_BYTES = 2**24
_CHUNK_BYTES = 2**20  # bytes read before they are hashed: few, so that they are still in the CPU's cache


@dataclass(frozen=True)
class DataHashes:
    """SHA-256 of the blocks of a .bin file and of its .idx file, which had these sizes and modification times.

    While a file is being hashed, `blocks` holds the first blocks only.
    """

    bin_bytes: int
    bin_mtime_ns: int
    idx_sha256: str  # hexadecimal; "": not known yet
    idx_bytes: int
    idx_mtime_ns: int
    blocks: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the .bin file."""
        return -(-self.bin_bytes // BLOCK_BYTES)

    @property
    def is_complete(self) -> bool:
        return len(self.blocks) == self.num_blocks and bool(self.idx_sha256)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content of both files. Their paths and times have no effect. Valid only if `is_complete`."""
        return _digest(self)

    def describes_bin(self, status: os.stat_result) -> bool:
        """Return whether the .bin with this status is the one that was hashed."""
        return (self.bin_bytes, self.bin_mtime_ns) == (status.st_size, status.st_mtime_ns)

    def describes_idx(self, status: os.stat_result) -> bool:
        """Return whether the .idx with this status is the one that was hashed."""
        return (self.idx_bytes, self.idx_mtime_ns) == (status.st_size, status.st_mtime_ns)

    def to_json(self) -> str:
        """Return the text of PREFIX.sha256.json. `sha256` is also a checksum of this text."""
        content = _Content(sha256=_digest(self), bin_bytes=self.bin_bytes, bin_mtime_ns=self.bin_mtime_ns,
                           idx_sha256=self.idx_sha256, idx_bytes=self.idx_bytes, idx_mtime_ns=self.idx_mtime_ns,
                           block_bytes=BLOCK_BYTES, block_sha256=list(self.blocks))
        return json.dumps(content, indent=0) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DataHashes":
        """Parse the text of PREFIX.sha256.json. Raises ValueError if it is damaged."""
        content = build(_Content, parse_json(text))
        hashes = cls(content["bin_bytes"], content["bin_mtime_ns"], content["idx_sha256"], content["idx_bytes"],
                     content["idx_mtime_ns"], tuple(content["block_sha256"]))
        if content["block_bytes"] != BLOCK_BYTES or len(hashes.blocks) > hashes.num_blocks:
            raise ValueError("the size or the number of its blocks is wrong")
        if content["sha256"] != _digest(hashes):
            raise ValueError("its content does not match the SHA-256 in it")
        return hashes


class _Content(TypedDict):
    """The content of PREFIX.sha256.json."""

    sha256: str
    bin_bytes: int
    bin_mtime_ns: int
    idx_sha256: str
    idx_bytes: int
    idx_mtime_ns: int
    block_bytes: int
    block_sha256: list[str]


def _digest(hashes: DataHashes) -> str:
    content = [str(hashes.bin_bytes), hashes.idx_sha256, *hashes.blocks]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def hashes_path(prefix: str | Path) -> Path:
    """Return the path of the hashes next to the data."""
    return Path(f"{prefix}.sha256.json")


def read_hashes(path: Path) -> DataHashes | None:
    """Read PREFIX.sha256.json. Returns None if there is no such file. Raises ValueError if it cannot be used."""
    try:
        return DataHashes.from_json(read_text(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(reason_of(error)) from None


def write_hashes(path: Path, hashes: DataHashes) -> None:
    """Replace the file atomically. Several processes may write the same file. Raises OSError."""
    replace_file(path, lambda temporary: write_synced(temporary, hashes.to_json().encode()))


def hash_block(descriptor: int, number: int, after_chunk: Callable[[], None] | None = None) -> str:
    """Read a block of an open file and return its SHA-256; at the end of the file it is shorter. Raises OSError.

    Reading and hashing release the GIL. `after_chunk` is called after each MiB.
    """
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    for start in range(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES, _CHUNK_BYTES):
        count = os.preadv(descriptor, [buffer], start)
        digest.update(buffer[:count])
        if after_chunk is not None:
            after_chunk()
        if count < _CHUNK_BYTES:
            break
    return digest.hexdigest()


def hash_file(descriptor: int, after_chunk: Callable[[], None]) -> str:
    """Read an open file and return its SHA-256. `after_chunk` is called after each MiB. Raises OSError."""
    digest, buffer, start = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES)), 0
    while count := os.preadv(descriptor, [buffer], start):
        digest.update(buffer[:count])
        start += count
        after_chunk()
    return digest.hexdigest()


if TYPE_CHECKING:  # numpy would cost the process that hashes 30 MB
    from pretrain.data.token_files.token_file import TokenFile


class BackgroundHash:
    """A process that hashes `index`, if it is given, and the blocks [first, num_blocks) of `file`.

    No method waits for it. `idx_sha256` is the hash of `index` from the first block on, and "" before.
    """

    def __init__(self, file: "TokenFile", *, first: int, num_blocks: int, index: "TokenFile | None" = None) -> None:
        descriptors = [file.descriptor] if index is None else [file.descriptor, index.descriptor]
        self.idx_sha256 = ""
        self._process = subprocess.Popen(
            child_command("pretrain.data.token_files.hashes", str(file.descriptor), str(first), str(num_blocks),
                          *map(str, descriptors[1:])),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=descriptors)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._unread = b""

    def read(self) -> list[str]:
        """Return the hashes of the blocks that were finished since the last call."""
        try:
            while part := os.read(self._output, 2**16):
                self._unread += part
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        words = [line.decode().split() for line in lines]
        self.idx_sha256 = next((digest for number, digest in words if number == "idx"), self.idx_sha256)
        return [digest for number, digest in words if number != "idx"]

    @property
    def has_ended(self) -> bool:
        """True if the process has ended. The hashes that it printed last may still be unread."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    # sent to all processes of the run
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, first, num_blocks, *index = map(int, sys.argv[1:])
    _lower_priority()
    pause = _Pause()
    for idx_descriptor in index:
        print("idx", hash_file(idx_descriptor, after_chunk=pause), flush=True)
    for block in range(first, num_blocks):
        print(block, hash_block(descriptor, block, after_chunk=pause), flush=True)


def _lower_priority() -> None:
    """Let the kernel run this process only when the training processes leave a core idle.

    Where Linux groups the processes of each session (sched_autogroup), a priority counts only within the session.
    Therefore the training process starts this one in its own session.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


class _Pause:
    """Waits after each chunk for as long as the chunk took, so that at most half of a core and disk is used."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> None:
        if select.select([sys.stdin], [], [], time.monotonic() - self._start)[0]:
            sys.exit()
        self._start = time.monotonic()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
