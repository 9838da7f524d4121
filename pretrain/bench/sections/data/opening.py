"""Time and memory of opening data sets of very many documents, next to plain readers of the same files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from pretrain.bench.sections.data.figures import DataBench, DataFigure
from pretrain.data.token_files.index_file import HEADER, MAGIC
from pretrain.data.token_files.writer import write_index
from pretrain.distributed.process import package_environment

_DOCUMENTS, _SPARSE_DOCUMENTS, _FULL_DOCUMENTS = 50_000_000, 10**9, 1000
_LONGEST = 2**31 - 1
_LENGTHS_AT_ONCE = 2**20
_MEASURE = """
import json, re, sys, time
import numpy as np
{imports}
start = time.perf_counter()
prefix, number = sys.argv[1], int(sys.argv[2])
{body}
assert len(sample) == 2049
seconds = time.perf_counter() - start
peak = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())  # getrusage counts the parent too
print(json.dumps([seconds, int(peak[1]) / 1024]))
"""
_OURS = _MEASURE.format(imports="""
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.samples.shuffled import ShuffledWindows
""", body="sample = ShuffledWindows(IndexedDataset(prefix), seq_length=2048, seed=1).samples([number])[0]")
_READ_ALL = _MEASURE.format(imports="", body="""
count, entries = np.fromfile(f"{prefix}.idx", "<u8", 2, offset=18)
lengths = np.fromfile(f"{prefix}.idx", "<i4", count, offset=34)
pointers = np.fromfile(f"{prefix}.idx", "<i8", count, offset=34 + 4 * int(count))
documents = np.fromfile(f"{prefix}.idx", "<i8", entries, offset=34 + 12 * int(count))
assert len(lengths) == documents[-1]
sample = np.memmap(f"{prefix}.bin", np.uint16, "r")[number * 2048:number * 2048 + 2049].astype(np.int64)
""")
_MAP = _MEASURE.format(imports="", body="""
buffer = memoryview(np.memmap(f"{prefix}.idx", mode="r"))
count, entries = map(int, np.frombuffer(buffer, "<u8", 2, 18))
lengths = np.frombuffer(buffer, "<i4", count, 34)
pointers = np.frombuffer(buffer, "<i8", count, 34 + 4 * count)
documents = np.frombuffer(buffer, "<i8", entries, 34 + 12 * count)
assert len(lengths) == documents[-1]
sample = np.memmap(f"{prefix}.bin", np.uint16, "r")[number * 2048:number * 2048 + 2049].astype(np.int64)
""")
_NOTE = "Opening: elapsed time after the imports, and peak memory, of a process that opens a set and reads a " \
        "sample of 2,048 tokens. The .idx of 50 M documents has 1 GB; that of 1,000 M documents is sparse (20 GB, " \
        "2.1 T tokens). np.fromfile reads the .idx into memory; np.memmap maps it, as Megatron-LM does, without a " \
        "check of its entries."


def opening(bench: DataBench) -> list[DataFigure]:
    """Measure 50 M documents in a complete .idx, and 1 B documents in a sparse one."""
    prefix, number = _write(bench.folder / "many", max(int(_DOCUMENTS * bench.scale), 1000)), 10**4
    figures = _compare(bench, f"open {_DOCUMENTS * bench.scale / 1e6:,.4g} M documents", prefix, number, _READ_ALL,
                       "np.fromfile of the .idx")
    Path(f"{prefix}.idx").unlink()
    prefix = _write_sparse(bench.folder / "most", max(int(_SPARSE_DOCUMENTS * bench.scale), _FULL_DOCUMENTS))
    return figures + _compare(bench, f"open {_SPARSE_DOCUMENTS * bench.scale / 1e6:,.4g} M documents, read sample 10^9",
                              prefix, 10**9, _MAP, "np.memmap of the .idx")


def _compare(bench: DataBench, name: str, prefix: Path, number: int, baseline: str, baseline_name: str,
             ) -> list[DataFigure]:
    runs = [[_run(code, prefix, number) for code in (_OURS, baseline)] for _ in range(bench.repetitions)]
    (seconds, memory), (other_seconds, other_memory) = np.array(runs).min(0).tolist()
    return [DataFigure(name, seconds * 1e3, other_seconds * 1e3, "ms", baseline_name, higher_is_better=False,
                       note=_NOTE),
            DataFigure(f"{name}: memory", memory, other_memory, "MiB", baseline_name, higher_is_better=False)]


def _run(code: str, prefix: Path, number: int) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code, str(prefix), str(number)], capture_output=True, text=True,
                          env=package_environment(), check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    seconds, memory = json.loads(done.stdout)
    return [seconds, memory]


def _write(prefix: Path, num_documents: int) -> Path:
    """Write a complete .idx of documents of 0 to 1,999 tokens. The .bin is sparse."""
    lengths, random, total = Path(f"{prefix}.lengths"), np.random.default_rng(0), 0
    with lengths.open("wb") as file:
        for first in range(0, num_documents, _LENGTHS_AT_ONCE):
            values = random.integers(0, 2000, min(_LENGTHS_AT_ONCE, num_documents - first), np.int32)
            file.write(values.tobytes())
            total += int(values.sum(dtype=np.int64))
    write_index(Path(f"{prefix}.idx"), np.uint16, lengths)
    lengths.unlink()
    _write_zeros(prefix, total)
    return prefix


def _write_sparse(prefix: Path, num_documents: int) -> Path:
    """Write a sparse .idx of empty documents and, at the end, 1,000 documents of 2^31 - 1 tokens."""
    numbers = np.arange(_FULL_DOCUMENTS, dtype=np.int64)
    arrays = (np.full(_FULL_DOCUMENTS, _LONGEST, "<i4"), (numbers * _LONGEST * 2).astype("<i8"),
              (num_documents - _FULL_DOCUMENTS + 1 + numbers).astype("<i8"))
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, num_documents, num_documents + 1))
        end = HEADER.size
        for values, count in zip(arrays, (num_documents, num_documents, num_documents + 1), strict=True):
            end += count * values.itemsize
            file.seek(end - values.nbytes)
            file.write(values.tobytes())
    _write_zeros(prefix, _FULL_DOCUMENTS * _LONGEST)
    return prefix


def _write_zeros(prefix: Path, num_tokens: int) -> None:
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", num_tokens * 2)
