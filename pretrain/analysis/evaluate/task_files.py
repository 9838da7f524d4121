"""Find the tasks of lm-eval that --tasks names, load their data, and plan the export. Imports no torch."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.convert.plan_export import ExportPlan, plan_export
from pretrain.cli import say
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError, shorten
from pretrain.terminal import clear_status, status

_PACKAGES = ("lm_eval", "accelerate")  # lm_eval.models.huggingface imports accelerate; peft only for adapters
_SEED = 1234  # lm-eval's default
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "evaluate", "httpx")


@dataclass(frozen=True)
class TaskFlags:
    """The flags of `ds-pretrain evaluate` for tasks of lm-eval."""

    names: tuple[str, ...] = ()
    folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    export: Path | None = None


@contextlib.contextmanager
def only_errors() -> Iterator[None]:
    """Silence the warnings of lm-eval and of the libraries that it uses. They repeat failed downloads line by line."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@dataclass(frozen=True)
class TaskPlan:
    """Checked tasks."""

    flags: TaskFlags
    tasks: dict[str, dict[str, Any]]  # lm-eval's "tasks", "groups" and "group_map", with the data of the tasks
    export: ExportPlan | None  # None: into a temporary folder, or nothing, if the model is a transformers folder


def prepare_tasks(source: EvaluationSource, flags: TaskFlags, tokenizer: Tokenizer | ConfigError, *, dtype: str,
                  ) -> TaskPlan | None:
    """Check the flags and load the tasks; None without --tasks. Raises ConfigError."""
    _check_flags(flags)
    if not flags.names:
        return None
    if isinstance(tokenizer, ConfigError):
        raise tokenizer
    export = None
    if flags.export is not None:
        if source.hf_folder is not None:
            raise ConfigError(f"--export {flags.export}", problem=f"{source.path} is a transformers folder already",
                              remedy="leave --export out")
        export = plan_export(source.folder, flags.export, dtype=dtype, tokenizer=str(tokenizer.path))
    try:
        return TaskPlan(flags, _load_tasks(_find_tasks(flags), flags), export)
    finally:
        clear_status()


def _check_flags(flags: TaskFlags) -> None:
    """Raise ConfigError if flags for tasks are given without --tasks, or a package or the folder is missing."""
    if not flags.names:
        for flag, value in (("--task_folder", flags.folder), ("--num_fewshot", flags.num_fewshot),
                            ("--limit", flags.limit), ("--export", flags.export)):
            if value is not None:
                raise ConfigError(flag, problem="it has no effect without --tasks", remedy="give --tasks too")
        return
    for name in flags.names:
        if "/" in name:
            raise ConfigError(f"--tasks {shorten(name)}", problem="this is a path, and not the name of a task",
                              remedy="name the folder of the task's file with --task_folder")
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError("--tasks", problem=f"the package {package} is not installed",
                              remedy="run `pip install 'ds-pretrain[eval]'`")
    if flags.folder is not None and not flags.folder.is_dir():
        raise ConfigError(f"--task_folder {flags.folder}", problem="there is no such folder",
                          remedy="name a folder with .yaml files that describe tasks")


def _find_tasks(flags: TaskFlags) -> Any:
    """Return lm-eval's TaskManager, which knows every task that the flags name. Raises ConfigError for unknown names.

    The 14,000 task files of lm-eval take 7 s. They are not read if the folder has all tasks.
    """
    from lm_eval.tasks import TaskManager

    with only_errors():
        if flags.folder is not None:
            _check_files(flags.folder)
            manager = TaskManager(include_path=str(flags.folder), include_defaults=False)
            if all(manager.match_tasks([name]) for name in flags.names):
                return manager
        status("reading the task files of lm-eval")
        manager = TaskManager(include_path=None if flags.folder is None else str(flags.folder))
    for name in flags.names:
        if not manager.match_tasks([name]):
            nothing = "lm-eval has no" if flags.folder is None else f"neither lm-eval nor {flags.folder} has a"
            raise ConfigError(f"--tasks {shorten(name)}", problem=f"{nothing} task with this name",
                              word=name, known=manager.all_tasks,
                              remedy="python -m lm_eval ls tasks lists the tasks of lm-eval")
    return manager


def _check_files(folder: Path) -> None:
    """Raise ConfigError for a file that is not valid YAML. lm-eval silently skips such files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    files = sorted(folder.glob("**/*.yaml"))
    if not files:
        raise ConfigError(f"--task_folder {folder}", problem="the folder has no .yaml file",
                          remedy="name a folder with .yaml files that describe tasks")
    for file in files:
        try:
            valid = isinstance(load_yaml(file, resolve_func=False, recursive=False), dict)
        except Exception as error:  # of yaml, of the file system, or about a missing "include"
            raise ConfigError(str(file), problem=f"it cannot be read: {first_line(error)}") from None
        if not valid:
            raise ConfigError(str(file), problem="it is not a YAML mapping with the key task")


def _load_tasks(manager: Any, flags: TaskFlags) -> dict[str, dict[str, Any]]:
    """Load the tasks with their data, which may be on the Hugging Face Hub.

    Raises ConfigError if the data of a task cannot be loaded, or its file is wrong.
    """
    found: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in flags.names:
        for match in manager.match_tasks([name]):
            status(f"loading the task {match} and its data: without a network, this takes up to a minute")
            try:
                with only_errors():
                    loaded = manager.load([match])
            except Exception as error:  # lm-eval, datasets and huggingface_hub raise many types
                raise _cannot_load(match, error) from None
            for kind, values in found.items():
                values.update(loaded[kind])
    for name, task in found["tasks"].items():
        _set_examples(name, task, flags.num_fewshot)
    return found


def _set_examples(name: str, task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples before each question, and the seed that selects them, as lm-eval's program does."""
    fixed = task.get_config("num_fewshot")
    if fixed == 0 and num_fewshot:
        say(f"note: --num_fewshot {num_fewshot} has no effect on {name}, whose file sets 0")
    elif fixed != 0:
        task.set_config(key="num_fewshot", value=(fixed or 0) if num_fewshot is None else num_fewshot)
    task.set_fewshot_seed(seed=_SEED)


def _cannot_load(name: str, error: Exception) -> ConfigError:
    if isinstance(error, ConnectionError):
        return ConfigError(f"--tasks {name}", problem=f"its data cannot be fetched: {first_line(error)}",
                           remedy="connect to the Hugging Face Hub, or give --task_folder with a task whose data is in "
                           "local files")
    return ConfigError(f"--tasks {name}", problem=f"lm-eval cannot load it: {first_line(error)}",
                       remedy="correct the file of the task, or its data")


def first_line(error: Exception) -> str:
    """Return the type and the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return shorten(f"{type(error).__name__}: {lines[0]}".rstrip(".") if lines else type(error).__name__)
