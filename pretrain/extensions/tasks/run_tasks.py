"""Scores of lm-eval's tasks inside a run: the engine that trains computes them, in every layout, without a checkpoint.

lm-eval runs on rank 0 only, in a thread. The ranks compute the batches that it asks for together.

Shapes: N sequences, T tokens.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from pretrain.callback import Callback, Run
from pretrain.config.plan import Plan
from pretrain.data.tokenizers.export_tokenizer import export_tokenizer
from pretrain.distributed.collectives import from_rank_0
from pretrain.engine.token_scores import score_tokens
from pretrain.errors import ConfigError
from pretrain.extensions.tasks.extension import Tasks, find_run_tasks, task_flags_of_run
from pretrain.extensions.tasks.task_files import (
    Scores,
    first_line,
    load_tasks,
    only_errors,
    scores_of,
    seed_examples,
)

if TYPE_CHECKING:
    from pretrain.extensions.tasks.engine_lm import Answer, Pair

_BOOTSTRAPS = 1000  # draws for the standard errors that have no formula
_BATCHES_PER_STAGE = 2  # micro-batches that are computed together keep a pipeline's stages busy


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their data, and the tokenizer as transformers loads it."""

    tasks: dict[str, dict[str, Any]]  # see `load_tasks`
    tokenizer: Any


def _load(plan: Plan, flags: Tasks) -> LoadedTasks:
    import datasets

    from pretrain.extensions.tasks.engine_lm import OUTPUT_TYPES

    datasets.disable_progress_bars()
    tasks = load_tasks(find_run_tasks(flags), task_flags_of_run(flags))
    for name, task in tasks["tasks"].items():
        if task.OUTPUT_TYPE not in OUTPUT_TYPES or getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(f"--eval_tasks {name}", problem="its answers are generated texts, which a run does not "
                              "score", remedy=f"evaluate the checkpoints: `ds-pretrain evaluate --tasks {name}`")
    from transformers import AutoTokenizer

    # a warning that config.json's default special tokens are outside of the vocabulary would say nothing about the run
    with tempfile.TemporaryDirectory(prefix="ds-pretrain-") as folder, only_errors():
        (Path(folder) / "config.json").write_text(json.dumps(plan.model.hf_config))
        assert plan.tokenizer is not None  # validated
        export_tokenizer(plan.tokenizer.name, Path(folder))
        return LoadedTasks(tasks, AutoTokenizer.from_pretrained(folder, local_files_only=True))


class _OfOtherThreads:
    """A stream without what the thread that creates it writes: the watchdog's line about a hang is printed."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._silent = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if self._stream is not None and threading.get_ident() != self._silent:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discard what lm-eval prints in this thread, among it progress bars."""
    out, error = _OfOtherThreads(sys.stdout), _OfOtherThreads(sys.stderr)
    with only_errors(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield


class RunTasks(Callback):
    """Computes the scores of the tasks of --eval_tasks with the engine of the run."""

    order = 60

    def __init__(self, flags: Tasks) -> None:
        self._flags = flags

    def connected(self, plan: Plan) -> None:
        """Load the tasks on rank 0. Raises ConfigError on every rank."""
        loaded: list[LoadedTasks] = []
        from_rank_0(lambda: loaded.append(_load(plan, self._flags)))
        self._loaded = loaded[0] if loaded else None

    def start(self, run: Run) -> None:
        self._plan, self._engine, layout = run.plan, run.engine, run.plan.layout
        self._rows = layout.micro_batch_size * layout.data_parallel_size * (
            1 if layout.pipeline_stages == 1 else _BATCHES_PER_STAGE * layout.pipeline_stages)
        # between the thread of lm-eval and the main thread of rank 0; None: there are no more
        self._batches: SimpleQueue[tuple[torch.Tensor, torch.Tensor] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[torch.Tensor, torch.Tensor] | None] = SimpleQueue()

    def end_step(self, run: Run) -> None:
        """Write the scores every --eval_tasks_interval steps."""
        interval = self._flags.eval_tasks_interval
        if not run.is_due(run.plan.args.eval_interval if interval is None else interval):
            return
        run.screen.status(f"step {run.step}/{run.plan.train_steps}  scoring tasks")
        with run.phase("eval"):
            scores, failure = self._scores(before_batch=lambda: run.watchdog.enter("eval", run.step))
        for task, values in scores.items():
            row = {"step": run.step, "time": time.time(), "consumed_samples": run.consumed_samples,
                   "split": f"tasks/{task}", **values}
            run.meter.write(row)
            run.screen.line(task_line(row))
        if failure:
            run.screen.line(f"warning: --eval_tasks has no scores at step {run.step}: {failure}")
            run.event("tasks_failed", reason=failure)

    def _scores(self, before_batch: Callable[[], None]) -> tuple[Scores, str]:
        """Return the scores on rank 0, and a line about a failure of lm-eval, or "". Empty on other ranks. Collective.

        A score "questions" is the number of questions of a task.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="lm-eval") as pool:
            future = None if self._loaded is None else pool.submit(self._evaluate, self._loaded)
            try:
                while (batch := from_rank_0(self._batches.get)) is not None:
                    before_batch()
                    scored = score_tokens(self._engine, *batch)
                    if future is not None:
                        self._results.put(scored)
            except BaseException:
                self._results.put(None)  # otherwise the thread would wait forever
                raise
        return ({}, "") if future is None else future.result()

    def _evaluate(self, loaded: LoadedTasks) -> tuple[Scores, str]:
        """Let lm-eval evaluate, in its thread on rank 0."""
        try:
            import lm_eval

            from pretrain.extensions.tasks.engine_lm import EngineLM

            seed_examples(loaded.tasks)  # an earlier evaluation has advanced the generator
            os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval would fork this rank to estimate standard errors
            model = EngineLM(loaded.tokenizer, self._plan.args.seq_length, self._answers)
            with _silenced():
                results = lm_eval.evaluate(model, task_dict=loaded.tasks, limit=self._flags.eval_tasks_limit,
                                           log_samples=False, bootstrap_iters=_BOOTSTRAPS)
            scores = scores_of(results["results"])
            for name, counts in results["n-samples"].items():  # groups have none
                scores[name]["questions"] = counts["effective"]
            return scores, ""
        except Exception as error:  # raised by lm-eval or a metric: it must not end the run
            return {}, f"lm-eval cannot evaluate: {first_line(error)}"
        finally:
            self._batches.put(None)  # otherwise all ranks would wait for a batch forever

    def _answers(self, pairs: "Sequence[Pair]") -> "list[Answer]":
        """Return the answers in the order of the pairs. Batches have sequences of similar lengths."""
        tokens = [(context + continuation)[-self._plan.args.seq_length - 1:] for context, continuation in pairs]
        answers: dict[int, Answer] = {}
        order = sorted(range(len(pairs)), key=lambda index: -len(tokens[index]))
        for start in range(0, len(order), self._rows):
            indices = order[start:start + self._rows]
            columns = torch.zeros(len(indices), len(tokens[indices[0]]), dtype=torch.int64)
            for row, index in enumerate(indices):
                columns[row, :len(tokens[index])] = torch.tensor(tokens[index])
            self._batches.put((columns[:, :-1], columns[:, 1:]))
            if (scored := self._results.get()) is None:
                raise RuntimeError("the ranks cannot compute this batch")
            for row, index in enumerate(indices):
                end = len(tokens[index]) - 1
                own = slice(max(end - len(pairs[index][1]), 0), end)
                is_greedy = torch.equal(scored[1][row, own], columns[row, 1:][own])
                answers[index] = float(scored[0][row, own].double().sum()), is_greedy
        return [answers[index] for index in range(len(pairs))]


def task_line(row: dict[str, Any]) -> str:
    """Format a row of a task's scores as a line of text, without standard errors."""
    scores = [f"{key} {value:.4f}" for key, value in row.items()
              if key not in ("step", "time", "consumed_samples", "split", "questions") and not key.endswith("_stderr")]
    return "  ".join([f"step {row['step']:>7}  {row['split']}", *scores])
