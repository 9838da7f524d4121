"""Check the flags for tasks of `ds-pretrain evaluate`, load the tasks, and plan the export. Imports no torch itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.analysis.evaluate.task_files import TaskFlags, find_tasks, load_tasks
from pretrain.analysis.model_source import EvaluationSource
from pretrain.checkpoint.convert.plan_export import ExportPlan, plan_export
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class TaskPlan:
    """Checked tasks."""

    flags: TaskFlags
    tasks: dict[str, dict[str, Any]]  # lm-eval's "tasks", "groups" and "group_map", with the data of the tasks
    export: ExportPlan | None  # None: into a temporary folder, or nothing, if the model is a transformers folder


def prepare_tasks(source: EvaluationSource, flags: TaskFlags, tokenizer: Tokenizer | ConfigError, *, dtype: str,
                  export: Path | None) -> TaskPlan | None:
    """Check the flags and load the tasks; None without --tasks. Raises ConfigError."""
    if not flags.names:
        for flag, value in (("--task_folder", flags.folder), ("--num_fewshot", flags.num_fewshot),
                            ("--limit", flags.limit), ("--export", export)):
            if value is not None:
                raise ConfigError(flag, problem="it has no effect without --tasks", remedy="give --tasks too")
        return None
    if isinstance(tokenizer, ConfigError):
        raise tokenizer
    plan = None
    if export is not None:
        if source.hf_folder is not None:
            raise ConfigError(f"--export {export}", problem=f"{source.path} is a transformers folder already",
                              remedy="leave --export out")
        plan = plan_export(source.folder, export, dtype=dtype, tokenizer=tokenizer.name)
    return TaskPlan(flags, load_tasks(find_tasks(flags), flags), plan)
