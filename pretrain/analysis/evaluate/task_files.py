"""Find the tasks of lm-eval that --tasks names, and load their data. Imports no torch."""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import ConfigError, shorten

_PACKAGES = ("lm_eval", "accelerate")  # lm_eval.models.huggingface imports accelerate; peft only for adapters
_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "transformers", "evaluate", "httpx")


@dataclass(frozen=True)
class TaskFlags:
    """The flags of tools/evaluate.py for tasks of lm-eval."""

    names: tuple[str, ...] = ()
    folder: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None


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


def check_task_flags(flags: TaskFlags) -> None:
    """Raise ConfigError if flags for tasks are given without --tasks, or a package or the folder is missing."""
    if not flags.names:
        for name in ("folder", "num_fewshot", "limit"):
            if getattr(flags, name) is not None:
                raise ConfigError(f"--{'task_folder' if name == 'folder' else name}",
                                  problem="it has no effect without --tasks", remedy="give --tasks too")
        return
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError("--tasks", problem=f"the package {package} is not installed",
                              remedy="pip install -c launch/constraints.txt -e '.[eval]'")
    if flags.folder is not None and not flags.folder.is_dir():
        raise ConfigError(f"--task_folder {flags.folder}", problem="there is no such folder",
                          remedy="name a folder with .yaml files that describe tasks")


def find_tasks(flags: TaskFlags) -> Any:
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
        manager = TaskManager(include_path=None if flags.folder is None else str(flags.folder))
    for name in flags.names:
        if not manager.match_tasks([name]):
            where = "" if flags.folder is None else f" and in {flags.folder}"
            raise ConfigError(f"--tasks {shorten(name)}", problem=f"there is no such task in lm-eval{where}",
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


def load_tasks(manager: Any, flags: TaskFlags) -> list[Any]:
    """Load the tasks with their data, which may be on the Hugging Face Hub. Returns tasks and groups of lm-eval.

    Raises ConfigError if the data of a task cannot be loaded, or its file is wrong.
    """
    found: dict[str, Any] = {}
    for name in flags.names:
        for match in manager.match_tasks([name]):
            try:
                with only_errors():
                    loaded = manager.load([match])
            except Exception as error:  # lm-eval, datasets and huggingface_hub raise many types
                raise _cannot_load(match, error) from None
            children = {child for names in loaded["group_map"].values() for child in names}
            found |= {key: task for kind in ("groups", "tasks") for key, task in loaded[kind].items()
                      if key not in children}
    return list(found.values())


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
