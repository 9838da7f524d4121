"""ds-pretrain from Python: plan a run, launch it, train inside of a rank, read what a run has written, load its model.

    from pretrain.api import launch, load_model, make_plan, read_run

    plan = make_plan("run.yaml", train_steps=200, save="runs/first")
    print(plan.memory().needed_bytes)
    result = launch(plan, ranks=2, callbacks=["my_module:MyCallback"])
    print(result.exit_code, result.losses, result.evaluations)

Bad input raises ConfigError, with the line that the command line prints. The names in `__all__`, their arguments and
the fields of their results are stable. tests/test_api.py holds them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.active_extensions import prepare_extensions
from pretrain.analysis.model_source import evaluation_source
from pretrain.analysis.run_table import Columns, RunTable, kept_evaluations, kept_rows
from pretrain.callback import Callback
from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import PROGRAM
from pretrain.distributed.world import world_from_environment
from pretrain.errors import FINISHED, ConfigError, import_package
from pretrain.memory.compare.compare import step_estimates
from pretrain.memory.estimate.estimate_memory import MemoryEstimate, estimate_memory
from pretrain.memory.hardware import Cluster, make_cluster, this_cpu_cluster
from pretrain.train import run_to_exit_code

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel

__all__ = ["ConfigError", "Result", "RunFiles", "RunPlan", "launch", "load_model", "make_plan", "read_run", "train"]

CallbackName = str | type[Callback]


@dataclass(frozen=True)
class RunPlan:
    """A validated run: what `ds-pretrain check` prints, as values."""

    words: tuple[str, ...]  # the run's flags, as on the command line
    ranks: int
    plan: Plan = field(repr=False)  # settings, layout, model, schedule, data; with the changes of a resume

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(self.plan.args.save)

    def memory(self) -> MemoryEstimate:
        """Predict the memory of the rank that needs the most: `needed_bytes`, and by place and role. No torch.

        Raises ConfigError if the layout has no prediction.
        """
        return estimate_memory(self.plan.model, self.plan.layout)

    def estimates(self, gpu: str | None = None) -> dict[str, Any]:
        """Return what the installed extensions predict of the run: "step_seconds", "cost" ...; {} without one.

        Args:
            gpu: a name such as "h100"; default: the device of this machine.
        """
        estimates = step_estimates(_cluster(self, gpu))
        tokens = self.plan.length.tokens_after(self.plan.train_steps)
        return {} if estimates is None else dict(estimates(self.plan.layout, self.plan.model, tokens))


def _cluster(plan: RunPlan, gpu: str | None) -> Cluster:
    cluster = make_cluster(gpu=gpu, world_size=plan.ranks, nodes=None, gpus_per_node=None)
    return this_cpu_cluster(cluster) if gpu is None and plan.plan.device.kind == "cpu" else cluster


def make_plan(config: str | os.PathLike[str] | None = None, *, ranks: int | None = None, **flags: Any) -> RunPlan:
    """Validate a run as `ds-pretrain check` does. Raises ConfigError for the first error; writes no file of the run.

    Args:
        config: YAML file of the run.
        ranks: number of ranks; default: 1, or inside of a rank the number that the launcher has started.
        flags: the flags of `ds-pretrain train`, which win over the YAML: numbers, texts, paths, True, False; lists for
            flags of several words; mappings for model_overrides and dataset_args. None leaves a flag out.
    """
    words = [f"--config={os.fspath(config)}"] if config is not None else []
    return _planned([*words, *(word for name, value in flags.items() for word in flag_words(name, value))], ranks)


def _planned(words: Sequence[str], ranks: int | None) -> RunPlan:
    args = parse_arguments(list(words))
    size = world_from_environment(os.environ).size if ranks is None else ranks
    if not isinstance(size, int) or size < 1:
        raise ConfigError("ranks", found=ranks, expected="a whole number from 1")
    start = check_start(args, world_size=size, device=detect_device())
    return RunPlan(tuple(words), size, start.plan_to_run)


def flag_words(name: str, value: Any) -> list[str]:
    """Return a flag as words of the command line. Raises ConfigError for values that no flag has."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = json.dumps(value) if name == "dataset_args" else \
            ",".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, (str, int, float)):
        raise ConfigError(f"{name}=", found=type(value).__name__,
                          expected="a number, a text, a path, True, False or a list")
    return [f"--{name}={value}"]


@dataclass(frozen=True)
class Result:
    """The end of a run, and the files that it has written."""

    exit_code: int  # 0: finished; 75: saved and stopped; `ds-pretrain reference exit_codes` has all
    run: Path  # the run folder

    @property
    def finished(self) -> bool:
        """Return whether the run has done all its steps."""
        return self.exit_code == FINISHED

    @cached_property
    def files(self) -> "RunFiles":
        """The files of the run."""
        return read_run(self.run)

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step, of the logged steps."""
        return _by_step(self.files.metrics, "loss") if "loss" in self.files.metrics else {}

    @property
    def evaluations(self) -> dict[str, dict[int, float]]:
        """Loss by step of each evaluated dataset."""
        return {split: _by_step(columns, "eval_loss") for split, columns in self.files.evaluations.items()
                if "eval_loss" in columns}


def _by_step(columns: Mapping[str, np.ndarray], key: str) -> dict[int, float]:
    return {int(step): float(value) for step, value in zip(columns["step"], columns[key], strict=True)}


def launch(plan: RunPlan, *, ranks: int | None = None, callbacks: Iterable[CallbackName] = (),
           quiet: bool = False) -> Result:
    """Start the ranks of a run on this host, from a script or a notebook, and wait for their end.

    An interrupt (Ctrl-C, or that of the notebook) makes the run save and stop. The ranks are other processes: they
    import callbacks by their names.

    Args:
        ranks: default: those of the plan. Another number is validated first.
        callbacks: "my_module:MyCallback", or such a class of a module that the ranks can import.
        quiet: discard the lines that the run prints.

    Raises:
        ConfigError: the run, or a callback, is rejected; no rank was started.
    """
    names = [callback_name(each) for each in callbacks]
    words = [*plan.words, *(["--extension", *_extensions_of(plan), *names] if names else [])]
    plan = _planned(words, ranks or plan.ranks)
    prepare_extensions(plan.plan)
    command = [sys.executable, PROGRAM, f"--num_accelerators={plan.ranks}", *words]
    sys.stdout.flush()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True)
    assert child.stdout is not None
    while True:
        try:
            for line in child.stdout:
                if not quiet:
                    print(line, end="", flush=True)
            return Result(child.wait(), plan.run)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)


def _extensions_of(plan: RunPlan) -> list[str]:
    """Return the extensions that the plan names: a further --extension would replace them."""
    return list(plan.plan.args.extension or [])


def callback_name(callback: CallbackName) -> str:
    """Return the name by which ranks import a callback. Raises ConfigError for one that they cannot import."""
    if isinstance(callback, str):
        return callback
    if not (isinstance(callback, type) and issubclass(callback, Callback)):
        raise ConfigError("callbacks", found=type(callback).__name__, expected="a class of a Callback, or its "
                          'name such as "my_module:MyCallback"', remedy="the ranks make the object themselves")
    if callback.__module__ == "__main__" or "." in callback.__qualname__:
        raise ConfigError(f"callbacks: {callback.__qualname__}", problem="the ranks are other processes and cannot "
                          "import a class of a notebook, of the started script, or inside of another one",
                          remedy="write the class into a module, such as my_module.py, and name it "
                          f'"my_module:{callback.__name__}"')
    return f"{callback.__module__}:{callback.__name__}"


def train(plan: RunPlan, callbacks: Iterable[CallbackName | Callback] = ()) -> Result:
    """Train inside of this rank, which any launcher has started: torchrun, mpirun, srun, deepspeed; or on one rank.

    Call it on all ranks. Errors are printed by the rank that has them, as one line, and are the exit code of the
    result; end the process with it, so that the launcher learns of it.

    Args:
        callbacks: objects, classes that are made without arguments, or names "my_module:MyCallback"; in the same order
            on all ranks.
    """
    named = [each for each in callbacks if isinstance(each, str)]
    others = [each() if isinstance(each, type) else each for each in callbacks if not isinstance(each, str)]
    for each in others:
        if not isinstance(each, Callback):
            raise ConfigError("callbacks", found=type(each).__name__, expected="a Callback of pretrain.callback")
    words = [*plan.words, *(["--extension", *_extensions_of(plan), *named] if named else [])]
    return Result(run_to_exit_code(lambda: parse_arguments(words), others), plan.run)


@dataclass(frozen=True)
class RunFiles:
    """What a run has written, without the steps that it trained again after a resume or a rollback.

    A value that a row lacks is NaN.
    """

    run: Path
    metrics: dict[str, np.ndarray] = field(repr=False)  # column of the logged steps by key: `reference metrics`
    evaluations: dict[str, dict[str, np.ndarray]] = field(repr=False)  # the same by dataset: "valid", "test" ...
    events: list[dict[str, Any]] = field(repr=False)  # rows of events.jsonl
    starts: list[dict[str, Any]] = field(repr=False)  # records of run.json: flags, JSON, versions, hosts

    def frame(self, table: str = "metrics") -> "pd.DataFrame":
        """Return a table as a DataFrame: "metrics", "events", or the name of an evaluated dataset. Needs pandas."""
        tables = {"metrics": self.metrics, "events": self.events, **self.evaluations}
        if table not in tables:
            raise ConfigError(f"frame({table!r})", found=table, expected=", ".join(tables), word=table, known=tables)
        return import_package("pandas", f"frame({table!r})", "", "it needs the package pandas").DataFrame(tables[table])


def read_run(folder: str | os.PathLike[str]) -> RunFiles:
    """Read the files of a run folder, also of a run that trains. Raises ConfigError if it is none."""
    table = RunTable(Path(folder))
    rows = kept_rows(table.training)
    evaluations = {split: _columns(columns, kept_evaluations(columns, table.training))
                   for split, columns in table.evaluations.items()}
    return RunFiles(table.run, _columns(table.training, rows), evaluations, table.events, table.starts)


def _columns(columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {key: columns.column(key)[rows] for key in columns.keys if key != "line"}


def load_model(run: str | os.PathLike[str], *, step: int | None = None, dtype: str = "fp32",
               device: str = "cpu") -> "PreTrainedModel":
    """Return the transformers model of a run, a checkpoint of any layout, or a transformers folder.

    The files are compared with their recorded hashes first. Raises ConfigError.

    Args:
        step: of the checkpoint; default: the newest good one.
        dtype: "fp32", "bf16" or "fp16".
        device: such as "cuda:0".
    """
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ConfigError("dtype", found=dtype, expected="fp32, bf16 or fp16")
    source = evaluation_source(Path(run), step)
    source.verify()
    from pretrain.engine.prepare import prepare_deepspeed

    prepare_deepspeed(detect_device())  # checkpoints hold objects of DeepSpeed
    import torch

    from pretrain.analysis.transformers_model import load_model as load

    return load(source, dtype, torch.device(device))
