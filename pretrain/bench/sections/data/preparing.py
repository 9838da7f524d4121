"""Speed and memory of tools/prepare_data.py as a command, next to a plain loop."""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.bench.sections.data.figures import DataBench, DataFigure
from pretrain.data.prepare.python_corpus import python_corpus
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.distributed.process import ROOT, package_environment

_MEGABYTES, _TIMES = 30.0, 5  # of text; how often it is prepared, so that the start of the processes matters less
_TRAINING_MEGABYTES = 4.0
_VOCAB_SIZE = 4096
_MEMORY_LIMIT_MIB = 512.0
_SECONDS_BETWEEN_SAMPLES = 0.1
_LOOP = """
import json, sys
import numpy as np
from sentencepiece import SentencePieceProcessor
processor = SentencePieceProcessor(model_file=sys.argv[2])
with open(sys.argv[1], encoding="utf-8") as lines, open(sys.argv[3], "wb") as out:
    for line in lines:
        tokens = [token for part in json.loads(line)["text"].split("\\n") for token in processor.encode(part)]
        out.write(np.array(tokens, np.uint16).tobytes())
"""


def preparing(bench: DataBench) -> list[DataFigure]:
    """Prepare Python's standard library with one worker and with two. All figures are of complete processes."""
    folder = bench.folder / "preparing"
    corpus = python_corpus(folder / "corpus", megabytes=_MEGABYTES * bench.scale)
    model = train_sentencepiece([str(corpus.train)], folder / "tokenizer", vocab_size=_VOCAB_SIZE,
                                max_megabytes=_TRAINING_MEGABYTES).path
    out = folder / "out"
    loop = [sys.executable, "-c", _LOOP, str(corpus.train), str(model), str(folder / "plain.bin")]
    commands = [loop, *([sys.executable, str(ROOT / "tools" / "prepare_data.py"), *[str(corpus.train)] * _TIMES,
                         "--tokenizer", str(model), "--out", str(out), "--overwrite", "--workers", str(workers)]
                        for workers in (1, 2))]
    least, peak = [float("inf")] * len(commands), 0.0
    for _ in range(bench.repetitions):
        for number, command in enumerate(commands):
            seconds, memory = _run(command)
            least[number], peak = min(least[number], seconds), max(peak, memory)
    plain, one, two = least
    tokens, size = IndexedDataset(out).num_tokens / 1e6, _text_megabytes(corpus.train) * _TIMES
    shutil.rmtree(folder)
    note = (f"Preparing: {size:.0f} MB of text, the whole command, per CPU second of all its processes. The ratio of 2 "
            "workers to 1 is the scaling on idle cores. Memory: proportional set size of all processes.")
    plain *= _TIMES
    plain_name = "encode() of each line"
    return [DataFigure("preparing, 1 worker", size / one, size / plain, "MB/s", plain_name, note=note),
            DataFigure("preparing, 1 worker, tokens", tokens / one, tokens / plain, "M tokens/s", plain_name),
            DataFigure("preparing, 2 workers", size / two, size / plain, "MB/s", plain_name),
            DataFigure("preparing, 2 workers, scaling", size / two, size / one, "MB/s", "1 worker"),
            DataFigure("preparing, memory", peak, _MEMORY_LIMIT_MIB, "MiB", "the limit", higher_is_better=False)]


def _text_megabytes(path: Path) -> float:
    with path.open(encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Return the CPU seconds of a command and its processes, and their highest memory in MiB."""
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env=package_environment())
    while True:
        try:
            errors = process.communicate(timeout=_SECONDS_BETWEEN_SAMPLES)[1]
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(map(_proportional_mib, _process_tree(process.pid))))
    if process.returncode:
        raise RuntimeError(errors.strip()[-300:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    with contextlib.suppress(OSError):  # a process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _process_tree(int(child))
    return found


def _proportional_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0
