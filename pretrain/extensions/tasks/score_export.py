"""Evaluate tasks of lm-eval with the model as transformers loads it: exported, or a transformers folder as it is."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from lm_eval.models.huggingface import HFLM

from pretrain.analysis.model_source import LOCAL_FILES, EvaluationSource
from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import ExportPlan, plan_export
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.distributed.collectives import from_rank_0, gather
from pretrain.errors import ConfigError
from pretrain.extensions.tasks.checkpoint_tasks import TaskPlan
from pretrain.extensions.tasks.task_files import Scores, first_line, only_errors, scores_of
from pretrain.model.parameters import DTYPES

_BATCH_SIZE = 8  # sequences of a micro-batch, by default


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


def evaluate_tasks(source: EvaluationSource, plan: TaskPlan, *, seq_length: int | None,
                   batch_size: int | None) -> Scores:
    """Export the model if necessary, and return the scores of the tasks on rank 0; {} on other ranks. Collective.

    Raises ConfigError.
    """
    _check_sizes(plan)
    flags, tokenizer, dtype = plan.flags, plan.tokenizer, plan.dtype
    with _transformers_folder(source, plan.export, tokenizer, dtype) as folder, only_errors():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], **LOCAL_FILES)
        model = model.to(get_accelerator().current_device_name()).eval()
        lm = RankLM(model, tokenizer=_transformers_tokenizer(source, folder, tokenizer),
                    batch_size=batch_size or _BATCH_SIZE, max_length=seq_length)
        try:
            # not simple_evaluate: it would read all task files again, and start pip and git to describe the machine
            results = lm_eval.evaluate(lm, task_dict=plan.tasks, limit=flags.limit, log_samples=False)
        except torch.OutOfMemoryError:
            raise ConfigError("--micro_batch_size", problem="the device has too little memory",
                              remedy="give a smaller one, or a smaller --seq_length") from None
        except (ValueError, KeyError, TypeError, ArithmeticError, OSError) as error:
            raise ConfigError(f"--tasks {','.join(flags.names)}",
                              problem=f"lm-eval cannot evaluate: {first_line(error)}",
                              remedy="correct the file of the task, or its data") from error
    return {} if results is None else scores_of(results["results"])


def _check_sizes(plan: TaskPlan) -> None:
    """Raise ConfigError if a rank would have no document of a task: lm-eval would wait for it forever."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for name, task in plan.tasks["tasks"].items() if ranks > 1 else ():
        documents = min(len(task.eval_docs), plan.flags.limit or len(task.eval_docs))
        if documents < ranks:
            raise ConfigError(f"--tasks {name}", problem=f"{documents} documents cannot be divided among "
                              f"{ranks} ranks", remedy="start fewer ranks")


def _transformers_tokenizer(source: EvaluationSource, folder: Path, tokenizer: Tokenizer) -> Any:
    """Load the tokenizer with transformers: from the exported folder, or from where --tokenizer says."""
    if source.hf_folder is None or tokenizer.path.parent == folder:
        return transformers.AutoTokenizer.from_pretrained(folder, **LOCAL_FILES)
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-") as temporary:
        shutil.copy(folder / "config.json", temporary)
        export_tokenizer(tokenizer.name, Path(temporary))
        return transformers.AutoTokenizer.from_pretrained(temporary, **LOCAL_FILES)


@contextlib.contextmanager
def _transformers_folder(source: EvaluationSource, export: ExportPlan | None, tokenizer: Tokenizer,
                         dtype: str) -> Iterator[Path]:
    """Yield a folder that transformers can load: the source itself, or an export."""
    if source.hf_folder is not None:
        yield source.folder
        return
    if export is not None:
        if dist.is_initialized():
            from_rank_0(lambda: export_hf(export))
        else:
            export_hf(export)
        yield export.out
        return
    own = _export_to_temporary_folder(source, tokenizer, dtype) if os.environ["LOCAL_RANK"] == "0" else None
    host = socket.gethostname()
    found = [(host, own)] if not dist.is_initialized() else gather((host, own))
    try:
        errors = [folder for _, folder in found if isinstance(folder, ConfigError)]
        if errors:
            raise errors[0]
        yield next(folder for name, folder in found if name == host and isinstance(folder, Path))
    finally:
        if isinstance(own, Path):
            shutil.rmtree(own.parent, ignore_errors=True)


def _export_to_temporary_folder(source: EvaluationSource, tokenizer: Tokenizer, dtype: str) -> Path | ConfigError:
    """Export the model for the ranks of this host. Returns the folder, or the error that all ranks raise."""
    temporary = Path(tempfile.mkdtemp(prefix="ds-pretrain-"))
    try:
        plan = plan_export(source.folder, temporary / "model", dtype=dtype, tokenizer=tokenizer.name)
        export_hf(plan)
        return plan.out
    except ConfigError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        return error
