"""Evaluate tasks of lm-eval with the model as transformers loads it: exported, or a transformers folder as it is."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from lm_eval.models.huggingface import HFLM

from pretrain.analysis.evaluate.inputs import ModelSource
from pretrain.analysis.evaluate.losses import DTYPES
from pretrain.analysis.evaluate.task_files import TaskFlags, first_line, only_errors
from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.errors import ConfigError

_BATCH_SIZE = 8  # sequences of a micro-batch, by default
Scores = dict[str, dict[str, Any]]
"""task -> metric or "METRIC_stderr" -> value"""


class RankLM(HFLM):
    """lm-eval's transformers model on one of several ranks, which divide the requests of each task.

    HFLM itself (lm_eval 0.4.13, models/huggingface.py) divides them on GPUs of one host only.
    """

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(pretrained=model, **settings)
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(gather(tensor.cpu()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        values = gather(obj)
        return values if self._rank == dst else None

    def barrier(self) -> None:
        gather(None)


def evaluate_tasks(source: ModelSource, tasks: Sequence[Any], flags: TaskFlags, *, export: Path | None,
                   tokenizer: str | None, dtype: str, seq_length: int | None, batch_size: int | None) -> Scores:
    """Export the model if necessary, and return the scores of the tasks on rank 0; {} on other ranks. Collective.

    `export`: new folder that keeps the exported model; None: a temporary folder on each host. Raises ConfigError.
    """
    with _transformers_folder(source, export, tokenizer, dtype) as folder, only_errors():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
        model = model.to(get_accelerator().current_device_name()).eval()
        lm = RankLM(model, tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
                    batch_size=batch_size or _BATCH_SIZE, max_length=seq_length)
        try:
            results = lm_eval.simple_evaluate(lm, tasks=list(tasks), num_fewshot=flags.num_fewshot, limit=flags.limit,
                                              log_samples=False)
        except torch.OutOfMemoryError:
            raise ConfigError("--micro_batch_size", problem="the device has too little memory",
                              remedy="give a smaller one, or a smaller --seq_length") from None
        except (ValueError, KeyError, TypeError, ArithmeticError, OSError) as error:
            raise ConfigError(f"--tasks {','.join(flags.names)}", problem=f"lm-eval cannot evaluate: {first_line(error)}",
                              remedy="correct the file of the task, or its data") from error
    return {} if results is None else _scores(results["results"])


def _scores(results: dict[str, dict[str, Any]]) -> Scores:
    """Return the numbers by task and metric. A filter other than "none" is part of the metric's name."""
    scores: Scores = {}
    for task, values in results.items():
        scores[task] = {key.removesuffix(",none").replace(",", " "): value for key, value in values.items()
                        if "," in key and isinstance(value, (int, float))}
    return scores


@contextlib.contextmanager
def _transformers_folder(source: ModelSource, export: ExportPlan | None, tokenizer: str | None,
                         dtype: str) -> Iterator[Path]:
    """Yield a folder that transformers can load: the source itself, or an export."""
    if source.hf_folder is not None:
        yield source.folder
        return
    if export is not None:
        _on_first_rank_of_host(lambda: export_hf(export), one_host=True)
        yield export.out
        return
    temporary = Path(tempfile.mkdtemp(prefix="ds-pretrain-")) if _is_first_on_host() else Path()
    try:
        plan = plan_export(source.folder, temporary / "model", dtype=dtype, tokenizer=tokenizer)
        folders = _on_first_rank_of_host(lambda: export_hf(plan))
        yield folders
    finally:
        if temporary != Path():
            shutil.rmtree(temporary, ignore_errors=True)
