"""The set of digests: compared with a Python set, doubled, rebuilt from its log."""

from pathlib import Path

import numpy as np
import pytest

from pretrain.data.prepare import seen_digests
from pretrain.data.prepare.seen_digests import SeenDigests


def random_digests(generator: np.random.Generator, count: int, different: int) -> np.ndarray:
    """Return `count` digests of at most `different` values; some have the same slot, or zeros in one half."""
    values = generator.integers(0, 2**64, (different, 2), np.uint64)
    values[::40, 0] = values[0, 0]  # the same slot, other digests
    values[::11, 0] = 0
    return values[generator.integers(0, different, count)]


@pytest.mark.parametrize("small_table_bytes", [1 << 25, 0])
def test_finds_the_same_as_a_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_table_bytes: int) -> None:
    """With 0 bytes, the pages of the table are given back to the kernel after each batch."""
    monkeypatch.setattr(seen_digests, "_SMALL_TABLE_BYTES", small_table_bytes)
    monkeypatch.setattr(seen_digests, "_BATCH", 64)
    generator = np.random.default_rng(1)
    log, known = tmp_path / "log", set()
    log.touch()
    seen = SeenDigests(tmp_path / "table", log, num_logged=0, first_slots=16)
    for number in range(60):
        digests = random_digests(generator, int(generator.integers(0, 200)), 3000)
        expected = []
        for digest in map(bytes, digests):
            expected.append(digest not in known)
            known.add(digest)
        found = seen.add(digests)
        assert found.tolist() == expected
        with log.open("ab") as file:
            file.write(digests[found].tobytes())
        if number % 20 == 10:  # as after a kill
            seen = SeenDigests(tmp_path / "table", log, num_logged=log.stat().st_size // 16, first_slots=16)
    assert log.stat().st_size == 16 * len(known)
    seen.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]


def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").touch()

    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seen_digests.os, "posix_fallocate", no_space)
    with pytest.raises(OSError, match="No space left"):
        SeenDigests(tmp_path / "table", tmp_path / "log", num_logged=0)
