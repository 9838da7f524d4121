"""IndexedWriter and write_index: long documents, more than 2^31 tokens, and the memory that many documents need."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter, write_index
from pretrain.errors import ConfigError

_LONGEST = 2**31 - 1
_MANY = """
import re, sys
import numpy as np
from pretrain.data.token_files.writer import IndexedWriter

def peak_mib():
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024

with IndexedWriter(sys.argv[1], np.uint16) as writer:
    ends = np.arange(1, 2**14 + 1)
    writer.add_documents(np.zeros(2**14, np.uint16), ends)
    before = peak_mib()
    for _ in range(2**8 - 1):
        writer.add_documents(np.zeros(2**14, np.uint16), ends)
    writer.finalize()
print(peak_mib() - before)
"""


def test_more_tokens_than_fit_32_bits(tmp_path: Path) -> None:
    """Three documents of 2^31 - 1 tokens in a sparse file: positions and bytes are 64-bit numbers everywhere."""
    prefix, lengths = tmp_path / "a", np.array([_LONGEST, _LONGEST, _LONGEST, 5], "<i4")
    (tmp_path / "lengths").write_bytes(lengths.tobytes())
    write_index(tmp_path / "a.idx", np.int32, tmp_path / "lengths")
    bounds = [0, _LONGEST, 2 * _LONGEST, 3 * _LONGEST, 3 * _LONGEST + 5]
    with (tmp_path / "a.bin").open("wb") as file:
        os.truncate(file.fileno(), 4 * bounds[-1])
        for number, start in enumerate(bounds[:-1]):
            os.pwrite(file.fileno(), np.array([number + 1] * 4, "<i4").tobytes(), 4 * start)
    data = IndexedDataset(prefix)
    assert data.document_offsets().tolist() == bounds
    assert data.tokens(bounds[2] - 2, bounds[2] + 2).tolist() == [0, 0, 3, 3]
    assert data.tokens_at(bounds[:-1], 5).tolist() == [[number] * 4 + [0] for number in range(1, 5)]
    assert data.tokens(bounds[3], bounds[4]).tolist() == [4, 4, 4, 4, 0]
    assert len(data.fingerprint) == 64


def test_a_document_of_2_to_31_tokens_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a: found a document of 2147483648 tokens; expected at most 2147483647"), \
            IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_sequences([3, _LONGEST, _LONGEST + 1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "tokens"), [("uint16", [0, 65_536]), ("uint16", [-1]), ("int32", [2**31]),
                                               ("uint8", [256]), ("int64", [2**63])])
def test_a_token_that_does_not_fit_is_never_wrapped(tmp_path: Path, dtype: str, tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"a: found tokens .* expected .* the range of {dtype}"), \
            IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add_document(np.array(tokens))
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    """4 million documents have an .idx of 84 MB."""
    done = subprocess.run([sys.executable, "-c", _MANY, str(tmp_path / "a")], capture_output=True, text=True,
                          check=True)
    print(f"{done.stdout.strip()} MiB")
    assert float(done.stdout) < 30
    data = IndexedDataset(tmp_path / "a")
    assert (data.num_documents, data.num_tokens) == (2**22, 2**22)
