"""Find the tasks of --eval_tasks before a run is launched. Imports no torch."""

from pathlib import Path
from typing import Any

from pretrain.analysis.evaluate.task_files import TaskFlags, find_tasks
from pretrain.config.flags.arguments import RunArguments
from pretrain.errors import ConfigError


def task_flags(args: RunArguments) -> TaskFlags:
    """Return the tasks that the flags of a run choose. Raises ConfigError if they name none."""
    names = tuple(filter(None, (args.eval_tasks or "").split(",")))
    if not names:
        raise ConfigError("--eval_tasks", problem="it names no task", remedy="give names such as hellaswag,arc_easy")
    folder = None if args.eval_tasks_folder is None else Path(args.eval_tasks_folder)
    return TaskFlags(names, folder, args.eval_tasks_fewshot, args.eval_tasks_limit, tasks_flag="--eval_tasks",
                     folder_flag="--eval_tasks_folder", fewshot_flag="--eval_tasks_fewshot")


def find_run_tasks(args: RunArguments) -> Any:
    """Return lm-eval's TaskManager, which knows the tasks; None without --eval_tasks. Raises ConfigError."""
    return None if args.eval_tasks is None else find_tasks(task_flags(args))
