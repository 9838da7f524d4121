"""Scores of lm-eval's tasks, of checkpoints and inside a run, and texts of the model: flags, rules, rows."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.cli import path_text
from pretrain.config.flags.flag import Group
from pretrain.errors import ConfigError
from pretrain.extension import Extension, Problem
from pretrain.monitor.rows import EVALUATION_ROW

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan
    from pretrain.extensions.tasks.task_files import TaskFlags

GROUP = Group("evaluation and logging")
TASK_FLAGS = ("eval_tasks_folder", "eval_tasks_fewshot", "eval_tasks_limit", "eval_tasks_interval")
PREDICTIONS_FILE = "predictions.jsonl"  # in the run folder
_NOT_REPEATED = "tasks may hold code, and are downloaded"


@dataclass(frozen=True)
class Tasks:
    """Evaluations while a run trains, besides its loss."""

    show_predictions: int = GROUP.flag(
        0, "at each evaluation, let the model continue the beginnings of N fixed validation samples, and write its "
        "text next to the true one into RUN/predictions.jsonl and the report; 0: off", low=0, high=1000, repeats=True)
    eval_tasks: str | None = GROUP.flag(
        None, "tasks of lm-eval, such as hellaswag,arc_easy, whose scores the run computes and logs while it trains; "
        "needs --tokenizer and the package lm_eval", metavar="TASK,TASK", not_repeated=_NOT_REPEATED)
    eval_tasks_folder: str | None = GROUP.flag(
        None, "folder with more tasks, as .yaml files", parse=path_text, metavar="DIR", not_repeated=_NOT_REPEATED)
    eval_tasks_fewshot: int | None = GROUP.flag(
        None, "examples before each question of the tasks", low=0, high=1000, unset="the task's",
        not_repeated=_NOT_REPEATED)
    eval_tasks_limit: int | None = GROUP.flag(
        None, "score only the first N questions of each task", low=1, unset="all questions",
        not_repeated=_NOT_REPEATED)
    eval_tasks_interval: int | None = GROUP.flag(
        None, "steps between two scores of the tasks; 0: only at the end", low=0, unset="--eval_interval",
        not_repeated=_NOT_REPEATED)


_POSITION = {key: EVALUATION_ROW[key] for key in ("step", "time", "consumed_samples")}
TASK_ROW = {  # these and the metrics of the task, each with METRIC_stderr
    **_POSITION,
    "split": ("", "`tasks/NAME`, of a task or a group of tasks of lm-eval"),
    "questions": ("questions", "number of scored questions; not for groups"),
    "acc": ("fraction", "correct answers; other tasks have other metrics, under lm-eval's names"),
    "acc_norm": ("fraction", "correct answers, if the likelihoods of the answers are divided by their lengths"),
    "acc_stderr": ("fraction", "standard error; the same for other metrics"),
}
PREDICTION_ROW = {  # a text is `null` without --tokenizer
    **_POSITION,
    "sequence": ("", "number of the validation sample, from 0"),
    "prompt": ("", "text with which the sample begins"),
    "predicted": ("", "text with which the model continues it: the most likely token at each position"),
    "actual": ("", "text that follows in the sample"),
    "prompt_tokens": ("", "tokens of this text"),
    "predicted_tokens": ("", "tokens of this text"),
    "actual_tokens": ("", "tokens of this text"),
}


def _check(args: "RunArguments") -> None:
    flags = args.of(Tasks)
    for name in TASK_FLAGS if flags.eval_tasks is None else ():
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name}", problem="it has no effect without --eval_tasks",
                              remedy="give --eval_tasks too")


def _rules(plan: "Plan") -> "Iterator[Rule]":
    """Yield rules for validation data and a tokenizer that the run does not have."""
    from pretrain.config.layout_rules import Rule
    from pretrain.data.data_spec import names_of_split

    flags = plan.args.of(Tasks)
    yield Rule(flags.show_predictions and not names_of_split(plan.datasets, "valid"), "--show_predictions",
               problem="the run has no validation data", remedy="give --valid_data, or a --split with a second part")
    yield Rule(flags.eval_tasks is not None and plan.tokenizer is None, "--eval_tasks",
               problem="the run has no --tokenizer, and the questions are text",
               remedy="give the --tokenizer with which the data was prepared")


def task_flags_of_run(flags: Tasks) -> "TaskFlags":
    """Return the tasks that the flags of a run choose. Raises ConfigError if they name none."""
    from pretrain.extensions.tasks.task_files import TaskFlags

    names = tuple(filter(None, (flags.eval_tasks or "").split(",")))
    if not names:
        raise ConfigError("--eval_tasks", problem="it names no task", remedy="give names such as hellaswag,arc_easy")
    folder = None if flags.eval_tasks_folder is None else Path(flags.eval_tasks_folder)
    return TaskFlags(names, folder, flags.eval_tasks_fewshot, flags.eval_tasks_limit, tasks_flag="--eval_tasks",
                     folder_flag="--eval_tasks_folder", fewshot_flag="--eval_tasks_fewshot")


@functools.cache
def find_run_tasks(flags: Tasks) -> Any:
    """Return lm-eval's TaskManager for the tasks of a run. Raises ConfigError: see `find_tasks`."""
    from pretrain.extensions.tasks.task_files import find_tasks

    return find_tasks(task_flags_of_run(flags))


def _prepare(plan: "Plan") -> None:
    """Find the tasks; `RunTasks` finds them again, in no time. Raises ConfigError."""
    flags = plan.args.of(Tasks)
    if flags.eval_tasks is not None:
        find_run_tasks(flags)


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    """Yield the parts of a run. Their modules import torch: each is imported if the run has it."""
    flags = plan.args.of(Tasks)
    if flags.show_predictions:
        from pretrain.extensions.tasks.predictions import Predictions
        yield Predictions(flags.show_predictions)
    if flags.eval_tasks is not None:
        from pretrain.extensions.tasks.run_tasks import RunTasks
        yield RunTasks(flags)


EXTENSION = Extension(
    "tasks", "Scores tasks of lm-eval, of a checkpoint or while a run trains, and shows texts of the model.",
    settings=Tasks, check=_check, rules=_rules, prepare=_prepare, callbacks=_callbacks,
    extends={"evaluate": "checkpoint_tasks:add_flags"}, files=(PREDICTIONS_FILE,),
    section="predictions:Texts", section_files=("section.js",),
    events={"tasks_failed": ("", "lm-eval could not score `--eval_tasks`; the run continues")},
    problems={"tasks_failed": Problem("lm-eval could not score the tasks: {reason}", "look at the terminal's output")},
    rows={"Rows of the scores of --eval_tasks": TASK_ROW, f"Rows of {PREDICTIONS_FILE}": PREDICTION_ROW})
