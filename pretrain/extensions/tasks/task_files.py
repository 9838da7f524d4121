"""Find the tasks of lm-eval that flags name, and load their data. Imports no torch; `load_tasks` lets lm-eval do so."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.cli import say
from pretrain.errors import ConfigError, require_package, shorten
from pretrain.terminal import clear_status, status

_PACKAGES = ("lm_eval", "accelerate")  # lm_eval.models.huggingface imports accelerate; peft only for adapters
_SEED = 1234  # lm-eval's default
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "evaluate", "httpx")

Scores = dict[str, dict[str, Any]]
"""task -> metric or "METRIC_stderr" -> value"""


@dataclass(frozen=True)
class TaskFlags:
    """The tasks that flags choose, and the names of these flags for messages."""

    names: tuple[str, ...] = ()
    folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    tasks_flag: str = "--tasks"
    folder_flag: str = "--task_folder"
    fewshot_flag: str = "--num_fewshot"


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


def find_tasks(flags: TaskFlags) -> Any:
    """Return lm-eval's TaskManager, which knows every task that the flags name.

    Raises ConfigError for an unknown name, a package or folder that is missing, or a damaged file in the folder.

    The 14,000 task files of lm-eval take 7 s. They are not read if the folder has all tasks.
    """
    _check(flags)
    try:
        return _find(flags)
    finally:
        clear_status()


def _check(flags: TaskFlags) -> None:
    """Raise ConfigError for a name that is a path, and for a package or a folder that is missing."""
    for name in flags.names:
        if "/" in name:
            raise ConfigError(f"{flags.tasks_flag} {shorten(name)}", problem="this is a path, and not the name of a "
                              "task", remedy=f"name the folder of the task's file with {flags.folder_flag}")
    for package in _PACKAGES:
        require_package(package, flags.tasks_flag, "eval")
    if flags.folder is not None and not flags.folder.is_dir():
        raise ConfigError(f"{flags.folder_flag} {flags.folder}", problem="there is no such folder",
                          remedy="name a folder with .yaml files that describe tasks")


def _find(flags: TaskFlags) -> Any:
    from lm_eval.tasks import TaskManager

    with only_errors():
        if flags.folder is not None:
            _check_files(flags.folder, flags.folder_flag)
            manager = TaskManager(include_path=str(flags.folder), include_defaults=False)
            if all(manager.match_tasks([name]) for name in flags.names):
                return manager
        status("reading the task files of lm-eval")
        manager = TaskManager(include_path=None if flags.folder is None else str(flags.folder))
    for name in flags.names:
        if not manager.match_tasks([name]):
            nothing = "lm-eval has no" if flags.folder is None else f"neither lm-eval nor {flags.folder} has a"
            raise ConfigError(f"{flags.tasks_flag} {shorten(name)}", problem=f"{nothing} task with this name",
                              word=name, known=manager.all_tasks,
                              remedy="python -m lm_eval ls tasks lists the tasks of lm-eval")
    return manager


def _check_files(folder: Path, flag: str) -> None:
    """Raise ConfigError for a file that is not valid YAML. lm-eval silently skips such files."""
    from lm_eval.tasks._yaml_loader import load_yaml

    files = sorted(folder.glob("**/*.yaml"))
    if not files:
        raise ConfigError(f"{flag} {folder}", problem="the folder has no .yaml file",
                          remedy="name a folder with .yaml files that describe tasks")
    for file in files:
        try:
            valid = isinstance(load_yaml(file, resolve_func=False, recursive=False), dict)
        except Exception as error:  # an error of yaml, of the file system, or about a missing "include"
            raise ConfigError(str(file), problem=f"it cannot be read: {first_line(error)}") from None
        if not valid:
            raise ConfigError(str(file), problem="it is not a YAML mapping with the key task")


def load_tasks(manager: Any, flags: TaskFlags) -> dict[str, dict[str, Any]]:
    """Load the tasks with their data, which may be on the Hugging Face Hub.

    Returns lm-eval's "tasks", "groups" and "group_map". Raises ConfigError if the data of a task cannot be loaded, or
    its file is wrong.
    """
    try:
        return _load(manager, flags)
    finally:
        clear_status()


def _load(manager: Any, flags: TaskFlags) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in flags.names:
        for match in manager.match_tasks([name]):
            status(f"loading the task {match} and its data: without a network, this takes up to a minute")
            try:
                with only_errors():
                    loaded = manager.load([match])
            except Exception as error:  # lm-eval, datasets and huggingface_hub raise many types
                raise _cannot_load(match, error, flags) from None
            for kind, values in found.items():
                values.update(loaded[kind])
    for name, task in found["tasks"].items():
        _set_examples(name, task, flags)
    seed_examples(found)
    return found


def _set_examples(name: str, task: Any, flags: TaskFlags) -> None:
    """Set the number of examples before each question, as lm-eval's program does."""
    fixed, num_fewshot = task.get_config("num_fewshot"), flags.num_fewshot
    if fixed == 0 and num_fewshot:
        say(f"note: {flags.fewshot_flag} {num_fewshot} has no effect on {name}, whose file sets 0")
    elif fixed != 0:
        task.set_config(key="num_fewshot", value=(fixed or 0) if num_fewshot is None else num_fewshot)


def seed_examples(tasks: dict[str, dict[str, Any]]) -> None:
    """Let the next evaluation choose the examples before each question that lm-eval's program chooses."""
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=_SEED)


def scores_of(results: dict[str, dict[str, Any]]) -> Scores:
    """Return the numbers of lm-eval's results. A filter other than "none" is part of the metric's name."""
    return {task: {key.removesuffix(",none").replace(",", " "): value for key, value in values.items()
                   if "," in key and isinstance(value, (int, float))} for task, values in results.items()}


def _cannot_load(name: str, error: Exception, flags: TaskFlags) -> ConfigError:
    if isinstance(error, ConnectionError):
        return ConfigError(f"{flags.tasks_flag} {name}", problem=f"its data cannot be fetched: {first_line(error)}",
                           remedy=f"connect to the Hugging Face Hub, or give {flags.folder_flag} with a task whose "
                           "data is in local files")
    return ConfigError(f"{flags.tasks_flag} {name}", problem=f"lm-eval cannot load it: {first_line(error)}",
                       remedy="correct the file of the task, or its data")


def first_line(error: Exception) -> str:
    """Return the type and the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return shorten(f"{type(error).__name__}: {lines[0]}".rstrip(".") if lines else type(error).__name__)
