"""Find the tasks of --eval_tasks, before torch is imported."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.errors import ConfigError
from pretrain.extensions.tasks.extension import Tasks
from pretrain.extensions.tasks.task_files import TaskFlags, find_tasks

if TYPE_CHECKING:
    from pretrain.config.plan import Plan


def task_flags_of_run(flags: Tasks) -> TaskFlags:
    """Return the tasks that the flags of a run choose. Raises ConfigError if they name none."""
    names = tuple(filter(None, (flags.eval_tasks or "").split(",")))
    if not names:
        raise ConfigError("--eval_tasks", problem="it names no task", remedy="give names such as hellaswag,arc_easy")
    folder = None if flags.eval_tasks_folder is None else Path(flags.eval_tasks_folder)
    return TaskFlags(names, folder, flags.eval_tasks_fewshot, flags.eval_tasks_limit, tasks_flag="--eval_tasks",
                     folder_flag="--eval_tasks_folder", fewshot_flag="--eval_tasks_fewshot")


@functools.cache
def find_run_tasks(flags: Tasks) -> Any:
    """Return lm-eval's TaskManager for the tasks of a run. Raises ConfigError: see `find_tasks`."""
    return find_tasks(task_flags_of_run(flags))


def prepare(plan: "Plan") -> None:
    """Find the tasks; `RunTasks` finds them again, in no time. Raises ConfigError."""
    flags = plan.args.of(Tasks)
    if flags.eval_tasks is not None:
        find_run_tasks(flags)
