"""BenchContext: the temporary folder with the inputs that all baselines share: corpus, DeepSpeed JSONs, model."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.bench.processes.baseline_job import LEARNING_RATE, PROJECT_BASELINES, BaselineJob
from pretrain.bench.settings import BenchSettings
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import nvcc_fits_torch
from pretrain.model.config import ModelConfig, load_model_config

_DOCUMENT_TOKENS = 5000


class BenchContext:
    """Writes the corpus and the DeepSpeed JSONs, and creates the jobs that use them."""

    def __init__(self, settings: BenchSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.model, preset, overrides = preset_model(settings), settings.preset, _overrides(settings)
        self._model_flags = [f"--model={preset.model}"] + ([f"--model_overrides={overrides}"] if overrides else [])
        write_corpus(folder / "corpus", self.model.vocab_size, max(200 * preset.seq_length, 2_000_000))

    def job(self, name: str, baseline: str, *, ranks: int = 1, first_part: int = 0, core_parts: int | None = None,
            micro_batch_size: int | None = None, gradient_accumulation_steps: int = 1, stages: int = 1,
            train_flags: tuple[str, ...] = (), blocks: dict[str, Any] | None = None, **options: Any) -> BaselineJob:
        """Return a job, after writing its DeepSpeed JSON.

        Args:
            ranks: number of processes.
            core_parts: on a CPU, the cores are divided into this number of equal parts, and each rank gets one part
                (default: `ranks`).
            first_part: index of rank 0's part; on CUDA, index of its device.
            stages: pipeline stages.
            train_flags: flags of pretrain/train.py for this job only.
            blocks: further blocks of its DeepSpeed JSON.
            options: further values for the baseline, which reads them with `BaselineJob.option`.
        """
        settings = self.settings
        path = self.folder / f"{name.replace(' ', '_').replace('/', '_')}.json"
        path.write_text(json.dumps({**ds_config(
            settings, micro_batch_size=micro_batch_size or settings.preset.micro_batch_size, stages=stages,
            gradient_accumulation_steps=gradient_accumulation_steps), **(blocks or {})}))
        flags = [f"--deepspeed_config={path}", *self._model_flags, f"--train_data={self.folder / 'corpus'}",
                 "--split=1", f"--seq_length={settings.preset.seq_length}", "--train_steps=1000000",
                 "--lr_schedule=constant", "--lr_warmup_steps=0", "--save_interval=0", "--eval_interval=0",
                 f"--save={path.with_suffix('')}-run", *train_flags,
                 *(settings.train_flags if baseline in PROJECT_BASELINES else ())]
        cores = tuple(tuple(settings.cores_of(first_part + rank, core_parts or ranks)) for rank in range(ranks))
        return BaselineJob(name, baseline, tuple(flags), settings.device.kind, cores,
                           {"ds_config": str(path), "precision": settings.precision,
                            "first_device": first_part if settings.device.kind == "cuda" else 0, **options})


def ds_config(settings: BenchSettings, *, micro_batch_size: int, gradient_accumulation_steps: int,
              stages: int) -> dict[str, Any]:
    """Return a DeepSpeed JSON with ZeRO-1, AdamW and clipping. It has no "auto", so every baseline can read it."""
    params: dict[str, Any] = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if settings.device.kind == "cuda" and not nvcc_fits_torch():
        params |= {"torch_adam": True, "fused": True}  # DeepSpeed's FusedAdam needs nvcc
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": 1},
    }
    if settings.precision != "fp32":
        values[settings.precision] = {"enabled": True}
    if stages > 1:
        values["pipeline"] = {"stages": stages}
    return values


def write_corpus(prefix: Path, vocab_size: int, tokens: int) -> None:
    """Write random tokens with Zipf's law as in text, so that the loss falls within a few steps."""
    generator = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16 if vocab_size < 65500 else np.int32) as writer:
        for _ in range(0, tokens, _DOCUMENT_TOKENS):
            drawn = vocab_size ** generator.random(_DOCUMENT_TOKENS)  # density proportional to 1 / token
            writer.add_document(np.minimum(drawn.astype(np.int64), vocab_size) - 1)
        writer.finalize({"vocab_size": vocab_size, "max_token": vocab_size - 1})


def _overrides(settings: BenchSettings) -> str:
    return settings.preset.overrides.format(positions=settings.preset.seq_length)


def preset_model(settings: BenchSettings) -> ModelConfig:
    """Return the preset's model. Its number of positions is the sequence length where the preset sets it."""
    return load_model_config(settings.preset.model, _overrides(settings) or None)


def describe(settings: BenchSettings) -> str:
    """Describe the model and the batch in one line."""
    model, preset = preset_model(settings), settings.preset
    return f"{model.num_parameters() / 1e6:,.1f} M parameters ({model.num_layers} layers, width {model.hidden_size}, " \
           f"vocabulary {model.vocab_size:,}), sequence {preset.seq_length:,}, micro-batch " \
           f"{preset.micro_batch_size}, {settings.precision}, ZeRO-1"
