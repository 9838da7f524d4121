"""Run folders with synthetic rows."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = 1_795_000_000.0  # seconds
FEW_KEYS = ("step", "time", "consumed_samples", "consumed_tokens", "seq_length", "loss", "lr", "grad_norm",
            "loss_scale", "skipped_steps", "step_time_ms", "data_time_ms", "tokens_per_second", "tflops_per_device",
            "mfu", "memory_bytes", "peak_memory_bytes", "eta_seconds")


_RANDOM_KEYS = (
    "grad_norm", "grad_norm_max", "clip_rate", "param_norm", "update_ratio", "data_time_ms", "forward_time_ms",
    "backward_time_ms", "optimizer_time_ms", "tokens_per_second", "tflops_per_device", "mfu", "tflops_exact_per_device",
    "mfu_exact", "memory_bytes", "peak_memory_bytes", "host_memory_bytes", "power_watts", "goodput", "noise_scale")


def training_row(step: int, generator: random.Random) -> dict[str, Any]:
    """Return a row with all keys."""
    loss = 2 + 7 * math.exp(-step / 50) + generator.gauss(0, 0.05)
    return {
        "step": step, "time": START + step * 0.4 + generator.random() / 10, "consumed_samples": step * 16,
        "consumed_tokens": step * 16384, "seq_length": 1024, "loss": loss, "loss_max": loss + 0.1,
        "lr": 1e-3 / (1 + step / 100), "clip_norm": 1.0, "loss_scale": 1.0, "skipped_steps": 0, "reduce_time_ms": None,
        "step_time_ms": 380 + 20 * generator.random(), "save_time_ms": 10.0 * (step % 10 == 0), "eval_time_ms": 0.0,
        "pipeline_bubble": None, "global_batch_size": 16 if step < 20 else 32, "eta_seconds": 5.0,
        **{key: 1 + generator.random() for key in _RANDOM_KEYS}}


def rows_of(steps: list[int], *, seed: int = 0, eval_interval: int = 10) -> list[dict[str, Any]]:
    """Return training rows of the steps in this order, and after some of them evaluation rows of two splits."""
    generator, rows = random.Random(seed), []
    for step in steps:
        row = training_row(step, generator)
        rows.append(row)
        if step % eval_interval == 0:
            rows += [{"step": step, "time": row["time"] + 0.1, "consumed_samples": row["consumed_samples"],
                      "split": split, "eval_loss": row["loss"] + more, "eval_ppl": 9.0}
                     for split, more in (("valid", 0.25), ("valid/code", 0.5))]
    return rows


def event(kind: str, step: int, reason: str = "", **details: Any) -> dict[str, Any]:
    return {"time": START + step * 0.4, "event": kind, "step": step, "reason": reason, **details}


def record(seed: int = 1234, lr: float = 1e-3, **others: Any) -> dict[str, Any]:
    return {"time": START, "flags": {"seed": seed, "train_data": "/data/corpus", "save": f"runs/{seed}"},
            "deepspeed_config": {"optimizer": {"type": "AdamW", "params": {"lr": lr}}, "train_batch_size": 16},
            "model_config": {"model_type": "gpt2", "n_layer": 2}, "num_parameters": 1000, "train_steps": 100,
            "versions": {"torch": "2.7"}, "git_commit": "abc", "data": {"train": "e8ad"}, "hosts": ["vm"], **others}


def write_run(folder: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]] | None = None,
              starts: list[dict[str, Any]] | None = None) -> Path:
    """Write the three files of a run folder. NaN in a row is written as null, as a run does."""
    folder.mkdir(parents=True, exist_ok=True)
    append_rows(folder / "metrics.jsonl", rows)
    append_rows(folder / "events.jsonl", [event("start", 0)] if events is None else events)
    (folder / "run.json").write_text(json.dumps([record()] if starts is None else starts))
    return folder


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def rank_rows(hosts: Sequence[str], steps: Sequence[int], slow: dict[int, float], start: int = 0,
              **phases: float) -> list[dict[str, Any]]:
    """Return the header of a start and rows in which ranks are slower in the backward pass by a factor."""
    rows: list[dict[str, Any]] = [{"start": start, "hosts": list(hosts), "coordinates": [{} for _ in hosts]}]
    for step in steps:
        backward = [60 * slow.get(rank, 1.0) for rank in range(len(hosts))]
        ms = {"data": [1.0] * len(hosts), "forward": [30.0] * len(hosts), "backward": backward,
              "optimizer": [9.0] * len(hosts), "reduce_wait": [0.0] * len(hosts),
              "own": [40 + value for value in backward]}
        rows.append({"step": step, "steps": 1, "ms": ms})
    return rows
