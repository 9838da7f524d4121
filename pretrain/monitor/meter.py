"""Meter: writes rows of metrics.jsonl and lines on the screen. Only logged steps read values from the device."""

import time
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator

from pretrain.config.validate import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.process import resident_bytes
from pretrain.engine.loss_terms import loss_term_values
from pretrain.engine.steps import grad_norm, loss_scale
from pretrain.model.flops import flops_per_token
from pretrain.monitor.peak_flops import peak_tflops
from pretrain.monitor.write_run_folder import RunFolder
from pretrain.terminal.screen import Screen


def memory_bytes() -> tuple[int, int]:
    """Return (current, peak) memory: of torch's allocator on a GPU, resident memory of this process on a CPU."""
    device = get_accelerator()
    if device.device_name() != "cpu":
        return device.memory_allocated(), device.max_memory_allocated()
    return resident_bytes()


def _device_peak_tflops(plan: Plan) -> float | None:
    if plan.args.peak_tflops is not None:
        return plan.args.peak_tflops
    return None if get_accelerator().device_name() == "cpu" else peak_tflops(
        torch.cuda.get_device_name(), plan.layout.precision)


def format_duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 1:02:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def row_line(row: dict[str, Any], *, train_steps: int, fp16: bool, columns: int | None) -> str:
    """Format a row of metrics.jsonl as a line of text.

    If the line is longer than `columns`, its last parts are dropped. They are the least important parts, and the status
    line also shows the speed and the ETA.
    """
    parts = [f"step {row['step']:>7}/{train_steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}",
             f"grad norm {row['grad_norm']:.3f}"]
    if fp16:
        parts.append(f"scale {row['loss_scale']:g} (skipped {row['skipped_steps']})")
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else f"{row['tflops_per_device']:.2f} TFLOP/s")
    parts += [f"{row['memory_bytes'] / 2**30:.1f} GiB", f"ETA {format_duration(row['eta_seconds'])}"]
    while columns is not None and len("  ".join(parts)) > columns and len(parts) > 2:
        parts.pop()
    return "  ".join(parts)


class Meter:
    """Measures the time between logged steps. Rank 0 reports a line for each logged step and each evaluation.

    On a terminal the status line also shows the current step, the speed and the remaining time.
    """

    def __init__(self, plan: Plan, engine: DeepSpeedEngine, folder: RunFolder, screen: Screen, *, rank: int,
                 first_step: int) -> None:
        self.plan, self.engine, self.folder, self.screen, self.rank = plan, engine, folder, screen, rank
        self._peak_tflops = _device_peak_tflops(plan)
        self._step_seconds: float | None = None  # step time of the last row
        self.losses: dict[str, float] = {}  # last value of "loss", "valid loss", "test loss"
        self._last_step, self._last_time, self._data_seconds = first_step, time.perf_counter(), 0.0

    def timed_data(self, load: Callable[[int], list[MicroBatch]], consumed_samples: int) -> list[MicroBatch]:
        """Call `load(consumed_samples)`, and add its time to the waiting time for data."""
        start = time.perf_counter()
        micro_batches = load(consumed_samples)
        self._data_seconds += time.perf_counter() - start
        return micro_batches

    def restart(self, step: int) -> None:
        """Exclude the time until now from the next row, for example after an evaluation or a save."""
        self._last_step, self._last_time, self._data_seconds = step, time.perf_counter(), 0.0

    def due(self, step: int) -> bool:
        return step % self.plan.args.log_interval == 0 or step in (1, self.plan.train_steps)

    def log(self, step: int, loss: torch.Tensor, lr: float, consumed_samples: int) -> None:
        """Report step number `step` (from 1) if it is a logged step. `lr` is the learning rate of this step."""
        if not self.due(step):
            self._show_progress(step)
            return
        row = self._row(step, float(loss), lr, consumed_samples)
        self.restart(step)
        self.folder.metrics(row)
        if self.engine.monitor.enabled and not self.plan.layout.uses_pipeline_module and self.rank == 0:
            # DeepSpeed 0.19.8 writes the loss to its monitors only in PipelineEngine
            self.engine.monitor.write_events([("Train/Samples/train_loss", row["loss"], consumed_samples)])
        self.losses["loss"], self._step_seconds = row["loss"], row["step_time_ms"] / 1e3
        self.screen.line(row_line(row, train_steps=self.plan.train_steps, fp16=self.plan.layout.precision == "fp16",
                                  columns=self.screen.columns))
        self._show_progress(step)

    def log_eval(self, step: int, name: str, loss: float, consumed_samples: int, *, num_sets: int = 0) -> float:
        """Report an evaluation on the dataset `name` ("valid", "valid/NAME", "test"). Return the loss.

        With `num_sets`, it is the mean of the losses of this number of named sets.
        """
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
        mean = {"mean_of_sets": num_sets} if num_sets else {}
        self.folder.metrics({"step": step, "time": time.time(), "consumed_samples": consumed_samples, "split": name,
                             "eval_loss": loss, "eval_ppl": perplexity, **mean})
        if self.engine.monitor.enabled and self.rank == 0:
            self.engine.monitor.write_events([(f"Evaluation/{name}_loss", loss, consumed_samples)])
        self.losses[f"{name} loss"] = loss
        note = f"  (mean of {num_sets} sets)" if num_sets else ""
        self.screen.line(f"step {step:>7}  {name} loss {loss:.4f}  perplexity {perplexity:.2f}{note}")
        self.restart(step)
        return loss

    def _show_progress(self, step: int) -> None:
        """Show the status line. Until there is a row, estimate the step time from the time since the start."""
        if not self.screen.wants_status():
            return
        seconds = self._step_seconds or (time.perf_counter() - self._last_time) / max(step - self._last_step, 1)
        speed = self.plan.layout.tokens_per_step / seconds
        self.screen.status(f"step {step}/{self.plan.train_steps}  {speed:,.0f} tokens/s  "
                           f"ETA {format_duration((self.plan.train_steps - step) * seconds)}")

    def _row(self, step: int, loss: float, lr: float, consumed_samples: int) -> dict[str, Any]:
        steps = max(step - self._last_step, 1)
        step_seconds = (time.perf_counter() - self._last_time) / steps
        tokens = self.plan.layout.tokens_per_step
        length = self.plan.seq_lengths.at(consumed_samples - self.plan.layout.global_batch_size)
        tflops = tokens * flops_per_token(self.plan.model, length) / step_seconds / self.plan.layout.world_size / 1e12
        now_bytes, peak_bytes = memory_bytes()
        return {
            "step": step, "time": time.time(), "consumed_samples": consumed_samples,
            "consumed_tokens": consumed_samples * self.plan.args.seq_length, "seq_length": length, "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm(self.engine), "loss_scale": loss_scale(self.engine),
            "skipped_steps": self.engine.skipped_steps, "step_time_ms": step_seconds * 1e3,
            "data_time_ms": self._data_seconds / steps * 1e3, "tokens_per_second": tokens / step_seconds,
            "tflops_per_device": tflops, "mfu": tflops / self._peak_tflops if self._peak_tflops else None,
            "memory_bytes": now_bytes, "peak_memory_bytes": peak_bytes,
            "eta_seconds": (self.plan.train_steps - step) * step_seconds,
            **loss_term_values(self.engine),
        }
