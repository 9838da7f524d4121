"""--what data: speed of preparing and reading training data, next to other implementations of the same work."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pretrain.bench.processes import BenchContext, ReportProgress
from pretrain.bench.report import BenchSection
from pretrain.data.prepare.python_corpus import python_corpus
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.data.tokenizers.train_tokenizer import train_sentencepiece
from pretrain.distributed.process import ROOT, package_environment
from pretrain.model.config import load_model_config

_CORPUS_MEGABYTES, _TIMES = 30.0, 5  # how often the corpus is prepared, so that the start of the processes matters less
_VOCAB_SIZE, _TRAINING_MEGABYTES = 4096, 4.0
_MEMORY_LIMIT_MIB = 512.0
_PLAIN_PREPARATION = """
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
_MODEL = "pythia-31m"  # of the steps with --document_attention
_MEAN_TOKENS = {"short documents": 100, "usual documents": 500, "documents longer than a sample": 10**6}


@dataclass(frozen=True)
class DataBench:
    """Temporary folder, repetitions and amount of data of the measurements."""

    folder: Path
    repetitions: int  # --rounds: interleaved repetitions of each function
    scale: float = 1.0  # fraction of the usual amount of data; tests use less


@dataclass(frozen=True)
class DataFigure:
    """A value of this project, and that of the baseline, in the same unit."""

    name: str
    ours: float
    baseline: float
    unit: str
    baseline_name: str
    higher_is_better: bool = True

    @property
    def ratio(self) -> float:
        """How many times better than the baseline this project is; infinite if nothing was measurable."""
        better, worse = (self.ours, self.baseline) if self.higher_is_better else (self.baseline, self.ours)
        return better / worse if worse else float("inf")


def data(context: BenchContext, report: ReportProgress) -> BenchSection:
    """Run the measurements one after another. One that fails is reported, and the others continue."""
    bench = DataBench(context.folder / "data", context.settings.repetitions)
    bench.folder.mkdir()
    figures: list[DataFigure] = []
    failures = []
    for measure in (preparing, loading, documents):
        report(measure.__name__)
        try:
            figures += measure(bench)
        except Exception as error:
            failures.append(f"{measure.__name__}: {type(error).__name__}: {error}")
    notes = [f"Ratio: how many times better than the baseline. CPU time, the best of {bench.repetitions} interleaved "
             "repetitions.",
             f"Preparing: {_CORPUS_MEGABYTES * _TIMES:.0f} MB of source files of Python's standard library, the whole "
             "command, per CPU second of all its processes. The ratio of 2 workers to 1 is the scaling on idle cores. "
             "Memory: proportional set size of all processes.",
             f"Loader: samples of {_SEQ_LENGTH} tokens from the page cache, {_MICRO_BATCH} a micro-batch, "
             f"{_ACCUMULATION} micro-batches a step. Jump: until the first micro-batch of the step, and its prefetched "
             "successor.",
             f"Document attention: forward and backward pass of the preset {_MODEL} (vocabulary 8,192) in bf16, one "
             "sample; short documents have 100 tokens on average, usual ones 500."]
    rows = [[each.name, f"{each.ours:,.4g} {each.unit}", f"{each.baseline:,.4g} {each.unit}", each.baseline_name,
             f"{each.ratio:.2f}"] for each in figures]
    values = {each.name: {"ours": each.ours, "baseline": each.baseline, "unit": each.unit,
                          "baseline_name": each.baseline_name, "ratio": each.ratio} for each in figures}
    return BenchSection("data", "Training data", ["", "this project", "baseline", "which", "ratio"], rows, notes,
                        failures, {"figures": values})


def least_cpu_seconds(functions: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """Call the functions in turn, `repetitions` times, and return the least CPU time of each one.

    CPU time of all threads of this process: other processes of a busy machine change it less than the elapsed time.
    """
    least = [float("inf")] * len(functions)
    for _ in range(repetitions):
        for number, function in enumerate(functions):
            start = time.process_time()
            function()
            least[number] = min(least[number], time.process_time() - start)
    return least


def preparing(bench: DataBench) -> list[DataFigure]:
    """Compare tools/prepare_data.py with one worker and with two, and a plain loop. All figures are of processes."""
    corpus = python_corpus(bench.folder / "corpus", megabytes=_CORPUS_MEGABYTES * bench.scale).train
    model = train_sentencepiece([str(corpus)], bench.folder / "tokenizer", vocab_size=_VOCAB_SIZE,
                                max_megabytes=_TRAINING_MEGABYTES).path
    loop = [sys.executable, "-c", _PLAIN_PREPARATION, str(corpus), str(model), str(bench.folder / "plain.bin")]
    ours = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), *[str(corpus)] * _TIMES, "--tokenizer", str(model),
            "--out", str(bench.folder / "out"), "--overwrite", "--workers"]
    least, peak = [float("inf")] * 3, 0.0
    for _ in range(bench.repetitions):
        for number, command in enumerate((loop, [*ours, "1"], [*ours, "2"])):
            seconds, memory = _run_command(command)
            least[number], peak = min(least[number], seconds), max(peak, memory)
    with corpus.open(encoding="utf-8") as lines:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines) / 1e6
    plain, one, two = megabytes / least[0], megabytes * _TIMES / least[1], megabytes * _TIMES / least[2]
    loop_name = "encode() of each line"
    return [DataFigure("preparing, 1 worker", one, plain, "MB/s", loop_name),
            DataFigure("preparing, 2 workers", two, plain, "MB/s", loop_name),
            DataFigure("preparing, 2 workers, scaling", two, one, "MB/s", "1 worker"),
            DataFigure("preparing, memory", peak, _MEMORY_LIMIT_MIB, "MiB", "the limit", higher_is_better=False)]


def _run_command(command: Sequence[str]) -> tuple[float, float]:
    """Return the CPU seconds of a command and its processes, and their highest memory in MiB."""
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env=package_environment())
    while True:
        try:
            errors = process.communicate(timeout=0.1)[1]
            break
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(_proportional_bytes(process.pid)))
    if process.returncode:
        raise RuntimeError(errors.strip()[-300:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak / 2**20


def _proportional_bytes(pid: int) -> Iterator[int]:
    """Yield the proportional set size of a process and of each of its descendants."""
    process = psutil.Process(pid)
    for each in [process, *process.children(recursive=True)]:
        try:
            yield each.memory_full_info().pss
        except psutil.Error:  # the process has ended
            continue


def loading(bench: DataBench) -> list[DataFigure]:
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

    ours, plain, jump = least_cpu_seconds(
        [read, _plain_reader(prefixes, number), lambda: loader.step(next(targets))], bench.repetitions)
    loader.close()
    return [DataFigure("loader, blend of 8 sources", number / ours, number / plain, "samples/s",
                       "np.memmap, sample by sample"),
            DataFigure("jump to sample 10^9", jump * 1e3, ours * 1e3, "ms", f"reading and discarding {number:,}",
                       higher_is_better=False)]


def _plain_reader(prefixes: list[Path], number: int) -> Callable[[], None]:
    """Return a reader that maps the files, and collates tensors of single samples, as torch's DataLoader does."""
    import torch

    files = [np.memmap(f"{prefix}.bin", np.uint16, "r") for prefix in prefixes]
    random = np.random.default_rng(0)
    sources = random.choice(len(files), number, p=_WEIGHTS)
    starts = random.integers(0, min(map(len, files)) - _SEQ_LENGTH - 1, number)

    def sample(index: int) -> tuple[Any, Any, Any]:
        start = starts[index]
        text = torch.from_numpy(files[sources[index]][start:start + _SEQ_LENGTH + 1].astype(np.int64))
        return text[:-1].contiguous(), text[1:].contiguous(), torch.ones(_SEQ_LENGTH)

    def read() -> None:
        held: list[Any] = []  # two steps, as in training: the one in use and the next one
        for first in range(0, number, _MICRO_BATCH):
            rows = [sample(index) for index in range(first, first + _MICRO_BATCH)]
            held = [*held[1 - 2 * _ACCUMULATION:], [torch.stack(column) for column in zip(*rows, strict=True)]]

    return read


def documents(bench: DataBench) -> list[DataFigure]:
    """Compare forward and backward passes with and without --document_attention."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would guess it, and print a warning between the figures
    import torch

    from pretrain.data.loader import document_positions
    from pretrain.model.init import initialize_parameters
    from pretrain.model.layer_specs import as_module

    config, random = load_model_config(_MODEL, "vocab_size=8192"), np.random.default_rng(0)
    module = as_module(config)
    initialize_parameters(module, config, seed=1)
    module.bfloat16()
    length = max(16, round(config.max_positions * bench.scale))
    tokens_BT = torch.randint(1, config.vocab_size, (1, length))
    weights_BT = torch.full(tokens_BT.shape, 1 / length)

    def step_of(positions_BT: torch.Tensor | None) -> Callable[[], None]:
        def step() -> None:
            module(tokens_BT, tokens_BT, weights_BT, positions_BT).backward()
            module.zero_grad()
        return step

    # the lengths of the documents are distributed geometrically; token 0 ends a document
    positions = [torch.from_numpy(document_positions(np.where(random.random((1, length)) < 1 / mean, 0, 1), 0))
                 for mean in _MEAN_TOKENS.values()]
    plain, *seconds = least_cpu_seconds([step_of(each) for each in (None, *positions)], bench.repetitions)
    return [DataFigure(f"--document_attention, {name}", length / own, length / plain, "tokens/s", "without it")
            for name, own in zip(_MEAN_TOKENS, seconds, strict=True)]
