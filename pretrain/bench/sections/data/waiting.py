"""Time for which a real run waits for its data, as a fraction of the step time."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pretrain.bench.sections.data.figures import DataBench, DataFigure
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.process import ROOT
from pretrain.monitor.read_run_folder import read_metrics

_SOURCES, _SOURCE_TOKENS = 8, 500_000
_SEQ_LENGTH, _MICRO_BATCH = 512, 4
_STEPS, _LOG_INTERVAL = 40, 4


def waiting(bench: DataBench) -> list[DataFigure]:
    """Train the preset `tiny` on a blend of 8 sources with `pretrain/train.py`, and read data_time_ms of its rows."""
    folder = bench.folder / "waiting"
    prefixes = _write_sources(folder)
    steps = max(int(_STEPS * bench.scale), 2 * _LOG_INTERVAL)
    _train(prefixes, folder / "run", steps)
    rows = [row for row in read_metrics(folder / "run") if "loss" in row and row["step"] > _LOG_INTERVAL]
    step_ms, wait_ms = (statistics.fmean(row[key] for row in rows) for key in ("step_time_ms", "data_time_ms"))
    return [DataFigure("a run waits for its data", 100 * wait_ms / step_ms, 100 * _read_ms(prefixes) / step_ms,
                       "% of a step", "reading when the step begins", higher_is_better=False,
                       note=f"Waiting: {steps} steps of a run of the preset tiny on one rank, {_MICRO_BATCH} samples "
                       f"of {_SEQ_LENGTH} tokens a step, {step_ms:.0f} ms a step. Elapsed time.")]


def _write_sources(folder: Path) -> list[Path]:
    random, prefixes = np.random.default_rng(0), [folder / f"source{number}" for number in range(_SOURCES)]
    for prefix in prefixes:
        with IndexedWriter(prefix, np.uint16) as writer:
            writer.add_document(random.integers(0, 8192, _SOURCE_TOKENS, dtype=np.uint16))
            writer.finalize({"vocab_size": 8192, "max_token": 8191, "eod_token": 0})
    return prefixes


def _train(prefixes: list[Path], run: Path, steps: int) -> None:
    """Train on one rank. Raises CalledProcessError with the output of the run."""
    flags = {"deepspeed_config": ROOT / "ds_configs" / "zero1_bf16.json", "model": "tiny", "seq_length": _SEQ_LENGTH,
             "micro_batch_size": _MICRO_BATCH, "split": "1,0,0", "train_steps": steps, "log_interval": _LOG_INTERVAL,
             "save_interval": 0, "save": run}
    blend = [str(word) for number, prefix in enumerate(prefixes) for word in (1 + number, prefix)]
    words = [f"--{name}={value}" for name, value in flags.items()]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, ROOT / "pretrain" / "train.py", *words, "--train_data", *blend],
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run ended with exit code {done.returncode}: {done.stdout[-500:]}")


def _read_ms(prefixes: list[Path]) -> float:
    """Return the time in which the samples of a step are read, if they are not read ahead: the median of 50 steps."""
    from pretrain.data.loader import Loader  # imports torch

    blend = BlendedSamples([ShuffledWindows(IndexedDataset(prefix), seq_length=_SEQ_LENGTH, seed=1)
                            for prefix in prefixes], range(1, len(prefixes) + 1))
    loader = Loader(blend, micro_batch_size=_MICRO_BATCH, gradient_accumulation_steps=1)
    times = []
    for number in range(50):
        start = time.perf_counter()
        loader.step(1000 * number)
        times.append(1e3 * (time.perf_counter() - start))
    loader.close()
    return statistics.median(times)
