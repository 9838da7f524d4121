"""The study of a sweep: Optuna proposes the settings of runs, which are started here, several at a time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pretrain.api import flag_words, make_plan
from pretrain.cli import say
from pretrain.distributed.process import PROGRAM
from pretrain.errors import FINISHED, REJECTED, ConfigError, file_errors, import_package
from pretrain.extensions.sweep.sweep_file import Dimension, SweepFile
from pretrain.monitor.read_run_folder import Tail, is_number, newest_path

STORAGE = "study.log"  # in the folder: Optuna's journal
_POLL_S = 0.5
_FOLDER = "folder"  # user attribute of a trial: the name of its run folder
_MOST_REJECTED = 3  # runs in a row


def open_study(sweep: SweepFile) -> Any:
    """Create the study, or open that of an earlier start. Raises ConfigError."""
    optuna = import_package("optuna", "sweep", "sweep", "it needs the package optuna")
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with file_errors(sweep.folder, "the folder cannot be written to: {}"):
        sweep.folder.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep.folder / STORAGE)))
    done = sum(study.n_trials for study in optuna.get_all_study_summaries(storage))
    # another start continues with other random numbers than it has used already
    sampler = optuna.samplers.RandomSampler(seed=sweep.seed + done) if sweep.sampler == "random" else \
        optuna.samplers.TPESampler(seed=sweep.seed + done, n_startup_trials=max(3, sweep.runs // 4))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1) if sweep.prune else \
        optuna.pruners.NopPruner()
    return optuna.create_study(study_name="sweep", storage=storage, sampler=sampler, pruner=pruner, load_if_exists=True)


def name_of(trial: Any) -> str:
    """Return the name of a trial's run folder."""
    return trial.user_attrs.get(_FOLDER) or f"run_{trial.number:03}"


def newest_trials(study: Any) -> list[Any]:
    """Return the last trial of each run folder: an interrupted run is continued as another trial."""
    return list({name_of(trial): trial for trial in study.trials}.values())


def suggested(trial: Any, space: tuple[Dimension, ...]) -> dict[str, Any]:
    """Return the flags of a trial."""
    return {each.flag: _suggest(trial, each) for each in space}


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.choices:
        return trial.suggest_categorical(dimension.flag, list(dimension.choices))
    if dimension.is_whole:
        return trial.suggest_int(dimension.flag, dimension.low, dimension.high, log=dimension.log,
                                 step=int(dimension.step or 1))
    return trial.suggest_float(dimension.flag, dimension.low, dimension.high, log=dimension.log, step=dimension.step)


@dataclass
class _Running:
    """A run of the sweep that trains."""

    trial: Any
    run: Path
    slot: int
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    metrics: Tail
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # rows so far
    reported: int = 0  # evaluations that the pruner has seen
    is_pruned: bool = False

    def losses(self, metric: str) -> list[float]:
        """Read the new rows, and return the losses of the evaluations of this dataset so far."""
        if self.metrics.was_replaced():
            self.metrics, self.evaluations = Tail(self.metrics.path), []
        self.evaluations += [row for row in self.metrics.rows() if row.get("split") == metric
                             and is_number(row.get("step")) and is_number(row.get("eval_loss"))]
        return [float(row["eval_loss"]) for row in newest_path(self.evaluations)]


@dataclass
class Sweep:
    """Starts runs until the study has the number that the file asks for; an interrupted sweep is continued."""

    file: SweepFile
    study: Any
    rejected: int = 0  # runs in a row

    def run(self) -> None:
        """Train the runs that are missing. Raises ConfigError if all are rejected; KeyboardInterrupt after a save."""
        self._take_back_unfinished()
        running: list[_Running] = []
        try:
            while running or self._is_missing(running):
                while self._is_missing(running) and len(running) < self.file.parallel:
                    slots = {*range(self.file.parallel)} - {each.slot for each in running}
                    running.append(self._start(min(slots)))
                time.sleep(_POLL_S)
                running = [each for each in running if not self._poll(each)]
        except BaseException:
            for each in running:
                each.process.send_signal(signal.SIGINT)
            for each in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(timeout=600)
                each.log.close()
            raise

    def _is_missing(self, running: list[_Running]) -> bool:
        ended = sum(trial.state.is_finished() for trial in newest_trials(self.study))
        return ended + len(running) < self.file.runs

    def _take_back_unfinished(self) -> None:
        """Let runs that an earlier start has begun be trained on, in their folders."""
        for trial in self.study.trials:
            if trial.state.name == "RUNNING":
                self.study.enqueue_trial(trial.params, user_attrs={_FOLDER: name_of(trial)})
                self.study.tell(trial.number, state=_state("FAIL"))

    def _start(self, slot: int) -> _Running:
        trial = self.study.ask()
        flags = suggested(trial, self.file.space)
        name = name_of(trial)
        trial.set_user_attr(_FOLDER, name)
        run = self.file.folder / name
        environ = {**os.environ, "DS_PRETRAIN_NEXT": "0"}
        if self.file.devices:
            environ["CUDA_VISIBLE_DEVICES"] = self.file.devices[slot]
        log = (self.file.folder / f"{name}.log").open("ab")
        words = words_of_run(self.file, flags, run)
        process = subprocess.Popen([sys.executable, PROGRAM, f"--num_accelerators={self.file.ranks}", *words],
                                   env=environ, stdout=log, stderr=log, start_new_session=True)
        say(f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in flags.items()))
        return _Running(trial, run, slot, process, log, Tail(run / "metrics.jsonl"))

    def _poll(self, each: _Running) -> bool:
        """Report new evaluations of a run, and end it if others were better. Returns whether it has ended."""
        code = each.process.poll()
        losses = each.losses(self.file.metric)
        for number, loss in enumerate(losses[each.reported:], start=each.reported + 1):
            each.trial.report(loss, number)
        each.reported = max(each.reported, len(losses))
        if code is None:
            if losses and not each.is_pruned and each.trial.should_prune():
                each.is_pruned = True
                each.process.send_signal(signal.SIGTERM)
            return False
        each.log.close()
        self._end(each, code, losses)
        return True

    def _end(self, each: _Running, code: int, losses: list[float]) -> None:
        name, log = each.run.name, self.file.folder / f"{each.run.name}.log"
        self.rejected = self.rejected + 1 if code == REJECTED else 0
        if code == FINISHED and losses:
            self.study.tell(each.trial, losses[-1])
            say(f"{name}: {self.file.metric} loss {losses[-1]:.4f}")
        elif each.is_pruned and losses:
            self.study.tell(each.trial, state=_state("PRUNED"))
            say(f"{name}: ended early, {self.file.metric} loss {losses[-1]:.4f} after {len(losses)} evaluations")
        else:
            self.study.tell(each.trial, state=_state("FAIL"))
            reason = f"no evaluation of {self.file.metric}" if code == FINISHED else f"exit code {code}"
            say(f"{name}: failed, {reason}; its output is in {log}")
        if self.rejected >= _MOST_REJECTED:
            raise ConfigError(f"{self.file.path}: space", problem=f"{self.rejected} runs in a row were rejected: "
                              f"{_last_line(log)}")


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.removeprefix("ds-pretrain: error: ") for line in reversed(lines) if line.strip()), "")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def words_of_run(sweep: SweepFile, flags: dict[str, Any], run: Path) -> list[str]:
    """Return the flags of a run as words of a command line."""
    given = {**sweep.flags, **flags, "save": run}
    return [f"--config={sweep.config}", *(word for name, value in given.items() for word in flag_words(name, value))]


def check_sweep(sweep: SweepFile) -> None:
    """Raise ConfigError if runs with the first values of the space would be rejected."""
    first = {each.flag: each.choices[0] if each.choices else each.low for each in sweep.space}
    make_plan(sweep.config, ranks=sweep.ranks, **{**sweep.flags, **first, "save": sweep.folder / "run_of_first_values"})
