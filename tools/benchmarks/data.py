"""--what data: speed of preparing and reading training data, next to other implementations of the same work."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import numpy as np

from pretrain.child import WITHOUT_WORKING_FOLDER
from pretrain.commands.corpus import python_corpus
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.distributed.process import PROGRAM
from tools.benchmarks.processes import BenchContext, ReportProgress
from tools.benchmarks.report import BenchSection

_CORPUS_MEGABYTES, _TIMES = 30.0, 5  # how often the corpus is prepared, so that the start of the processes matters less
_VOCAB_SIZE, _TRAINING_MEGABYTES = 4096, 4.0
_PLAIN_PREPARATION = WITHOUT_WORKING_FOLDER + """
import json, sys
import numpy as np
from sentencepiece import SentencePieceProcessor
processor = SentencePieceProcessor(model_file=sys.argv[2])
with open(sys.argv[1], encoding="utf-8") as lines, open(sys.argv[3], "wb") as out:
    for line in lines:
        tokens = [token for part in json.loads(line)["text"].split("\\n") for token in processor.encode(part)]
        out.write(np.array(tokens, np.uint16).tobytes())
"""
_SEQ_LENGTH, _MICRO_BATCH, _ACCUMULATION = 2048, 8, 8
_WEIGHTS = (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05)  # of the sources of a blend
_SOURCE_TOKENS, _STEPS = 4_000_000, 64


@dataclass(frozen=True)
class DataBench:
    """Temporary folder, repetitions and amount of data of the measurements."""

    folder: Path
    repetitions: int  # --rounds: interleaved repetitions of each function
    scale: float = 1.0  # fraction of the usual amount of data; tests use less


@dataclass(frozen=True)
class DataFigure:
    """A value of this project, and of the baseline, in the same unit. The field names are the keys of --json."""

    ours: float
    baseline: float
    unit: str
    baseline_name: str
    ratio: float  # how many times better than the baseline this project is


def data(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Run the measurements one after another. One that fails is reported, and the others continue."""
    bench = DataBench(context.folder / "data", context.settings.repetitions)
    bench.folder.mkdir()
    figures: dict[str, DataFigure] = {}
    failures = []
    for measure in (preparing, loading):
        report(measure.__name__)
        try:
            figures |= measure(bench)
        except Exception as error:
            failures.append(f"{measure.__name__}: {type(error).__name__}: {error}")
    notes = [f"Ratio: how many times better than the baseline. CPU time, the best of {bench.repetitions} interleaved "
             "repetitions.",
             f"Preparing: {_CORPUS_MEGABYTES * _TIMES:.0f} MB of source files of Python's standard library, the whole "
             "command, per CPU second of all its processes. The ratio of 2 workers to 1 is the scaling on idle cores.",
             f"Loader: samples of {_SEQ_LENGTH} tokens from the page cache, {_MICRO_BATCH} a micro-batch, "
             f"{_ACCUMULATION} micro-batches a step. Jump: until the first micro-batch of the step, and its prefetched "
             "successor."]
    rows = [[name, f"{each.ours:,.4g} {each.unit}", f"{each.baseline:,.4g} {each.unit}", each.baseline_name,
             f"{each.ratio:.2f}"] for name, each in figures.items()]
    return BenchSection("data", "Training data", ["", "this project", "baseline", "which", "ratio"], rows, notes,
                        failures, {"figures": {name: asdict(each) for name, each in figures.items()}})


def least_seconds(functions: Sequence[Callable[[], object]], repetitions: int,
                  clock: Callable[[], float] = time.process_time) -> list[float]:
    """Call the functions in turn, `repetitions` times, and return the least time of each one.

    CPU time of all threads of this process: other processes of a busy machine change it less than the elapsed time.
    """
    least = [float("inf")] * len(functions)
    for _ in range(repetitions):
        for number, function in enumerate(functions):
            start = clock()
            function()
            least[number] = min(least[number], clock() - start)
    return least


def preparing(bench: DataBench) -> dict[str, DataFigure]:
    """Compare `ds-pretrain prepare` with one worker and with two, and a plain loop. All figures are of processes."""
    corpus = python_corpus(bench.folder / "corpus", megabytes=_CORPUS_MEGABYTES * bench.scale).train
    model = train_sentencepiece([str(corpus)], bench.folder / "tokenizer", vocab_size=_VOCAB_SIZE,
                                max_megabytes=_TRAINING_MEGABYTES).path
    loop = [sys.executable, "-c", _PLAIN_PREPARATION, str(corpus), str(model), str(bench.folder / "plain.bin")]
    ours = [sys.executable, PROGRAM, "prepare", *[str(corpus)] * _TIMES, "--tokenizer",
            str(model), "--out", str(bench.folder / "out"), "--overwrite", "--workers"]
    seconds = least_seconds([partial(_run, words) for words in (loop, [*ours, "1"], [*ours, "2"])],
                            bench.repetitions, _seconds_of_processes)
    with corpus.open(encoding="utf-8") as lines:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    plain, one, two = (megabytes * times / each for times, each in zip((1, _TIMES, _TIMES), seconds, strict=True))
    loop_name = "encode() of each line"
    return {"preparing, 1 worker": DataFigure(one, plain, "MB/s", loop_name, one / plain),
            "preparing, 2 workers": DataFigure(two, plain, "MB/s", loop_name, two / plain),
            "preparing, 2 workers, scaling": DataFigure(two, one, "MB/s", "1 worker", two / one)}


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])


def _seconds_of_processes() -> float:
    """Return the CPU time of the processes that this one has started and that have ended, with theirs."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def loading(bench: DataBench) -> dict[str, DataFigure]:
    """Measure samples per second of a blend of 8 sources, and a jump to a distant step."""
    from pretrain.data.loader import Loader  # imports torch

    random, prefixes = np.random.default_rng(0), [bench.folder / f"source{number}" for number in range(len(_WEIGHTS))]
    for prefix in prefixes:
        with IndexedWriter(prefix, np.uint16) as writer:
            for _ in range(8):
                writer.add_document(random.integers(0, 50_000, int(_SOURCE_TOKENS * bench.scale) // 8, dtype=np.uint16))
            writer.finalize()
    blend = BlendedSamples([ShuffledWindows(IndexedDataset(prefix), seq_length=_SEQ_LENGTH, seed=1)
                            for prefix in prefixes], _WEIGHTS)
    loader = Loader(blend, micro_batch_size=_MICRO_BATCH, gradient_accumulation_steps=_ACCUMULATION)
    steps = max(int(_STEPS * bench.scale), 2)
    number = steps * loader.global_batch_size
    targets = iter(range(10**9, 2 * 10**9, 7_654_321))

    def read() -> None:
        for step in range(steps):
            loader.step(step * loader.global_batch_size)

    ours, plain, jump = least_seconds(
        [read, _plain_reader(prefixes, number), lambda: loader.step(next(targets))], bench.repetitions)
    loader.close()
    return {"loader, blend of 8 sources": DataFigure(number / ours, number / plain, "samples/s",
                                                     "np.memmap, sample by sample", plain / ours),
            "jump to sample 10^9": DataFigure(jump * 1e3, ours * 1e3, "ms", f"reading and discarding {number:,}",
                                              ours / jump if jump else float("inf"))}


def _plain_reader(prefixes: list[Path], number: int) -> Callable[[], None]:
    """Return a reader that maps the files, and collates tensors of single samples, as torch's DataLoader does."""
    import torch

    files = [np.memmap(f"{prefix}.bin", np.uint16, "r") for prefix in prefixes]
    random = np.random.default_rng(0)
    sources = random.choice(len(files), number, p=_WEIGHTS)
    starts = random.integers(0, min(map(len, files)) - _SEQ_LENGTH - 1, number)

    def sample(index: int) -> tuple[torch.Tensor, ...]:
        start = starts[index]
        text = torch.from_numpy(files[sources[index]][start:start + _SEQ_LENGTH + 1].astype(np.int64))
        return text[:-1].contiguous(), text[1:].contiguous(), torch.ones(_SEQ_LENGTH)

    def read() -> None:
        held: list[list[torch.Tensor]] = []  # two steps, as in training: the one in use and the next one
        for first in range(0, number, _MICRO_BATCH):
            rows = [sample(index) for index in range(first, first + _MICRO_BATCH)]
            held = [*held[1 - 2 * _ACCUMULATION:], [torch.stack(column) for column in zip(*rows, strict=True)]]

    return read
