"""Tasks of lm-eval in `ds-pretrain evaluate`: their flags, and the scores of a checkpoint. Imports no torch itself."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.convert.plan_export import ExportPlan, plan_export
from pretrain.cli import Parser, path, text, whole_number
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.tasks.task_files import Scores, TaskFlags, find_tasks, load_tasks
from pretrain.terminal import status


@dataclass(frozen=True)
class TaskPlan:
    """Checked tasks."""

    flags: TaskFlags
    tasks: dict[str, dict[str, Any]]  # lm-eval's "tasks", "groups" and "group_map", with the data of the tasks
    export: ExportPlan | None  # None: into a temporary folder, or nothing, if the model is a transformers folder
    tokenizer: Tokenizer
    dtype: str


def add_flags(parser: Parser) -> None:
    """Add the flags to the parser of `ds-pretrain evaluate`."""
    add = parser.add_argument
    add("--tasks", type=text, metavar="TASK,TASK", help="tasks of lm-eval, for example hellaswag,arc_easy")
    add("--task_folder", type=path, metavar="DIR", help="folder with more tasks, as .yaml files")
    add("--num_fewshot", type=whole_number(), metavar="N", help="examples before each question (default: the task's)")
    add("--limit", type=whole_number(1), metavar="N", help="evaluate only the first N questions of each task")
    add("--export", type=path, metavar="DIR",
        help="new folder for the exported model that the tasks use (default: a temporary folder)")
    parser.set_defaults(scorings=(*parser.get_default("scorings"), TaskScoring.of_flags))


class TaskScoring:
    """Scores the tasks of --tasks with the exported model: see `Scoring` in commands/evaluate.py."""

    flag = "--tasks"

    def __init__(self, flags: TaskFlags, export: Path | None) -> None:
        self._flags, self._export = flags, export

    @classmethod
    def of_flags(cls, args: argparse.Namespace) -> "TaskScoring | None":
        """Return the tasks that the flags choose; None without --tasks. Raises ConfigError for flags without effect."""
        names = tuple(filter(None, (args.tasks or "").split(",")))
        if names:
            return cls(TaskFlags(names, args.task_folder, args.num_fewshot, args.limit), args.export)
        for flag in ("task_folder", "num_fewshot", "limit", "export"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag}", problem="it has no effect without --tasks", remedy="give --tasks too")
        return None

    def prepare(self, source: EvaluationSource, tokenizer: Tokenizer | ConfigError, dtype: str) -> None:
        """Load the tasks, and plan the export. Raises ConfigError."""
        if isinstance(tokenizer, ConfigError):
            raise tokenizer
        plan = None
        if self._export is not None:
            if source.hf_folder is not None:
                raise ConfigError(f"--export {self._export}", problem=f"{source.path} is a transformers folder already",
                                  remedy="leave --export out")
            plan = plan_export(source.folder, self._export, dtype=dtype, tokenizer=tokenizer.name)
        self._plan = TaskPlan(self._flags, load_tasks(find_tasks(self._flags), self._flags), plan, tokenizer, dtype)

    def scores(self, source: EvaluationSource, *, seq_length: int | None, batch_size: int | None) -> Scores:
        """Return the scores on rank 0; {} on other ranks. Collective. Raises ConfigError."""
        from pretrain.extensions.tasks.score_export import evaluate_tasks

        status("evaluating tasks")
        return evaluate_tasks(source, self._plan, seq_length=seq_length, batch_size=batch_size)
