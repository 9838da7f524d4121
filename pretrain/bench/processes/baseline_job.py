"""What one contender is told: the same data, the same DeepSpeed JSON, the same shape as the others."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.bench.settings import Settings
from pretrain.config.arguments import parse_arguments
from pretrain.config.validate import Plan, check_run
from pretrain.data.indexed import IndexedWriter
from pretrain.distributed.device import Device, cpu_device, cuda_device, has_nvcc
from pretrain.model.config import ModelConfig, load_model_config

LEARNING_RATE = 1e-4
OURS = ("project", "bare_engine", "loop", "checkpoint")  # this project: prepared as train.py is, with its flags
_DOCUMENT_TOKENS = 5000


@dataclass(frozen=True)
class Job:
    """One contender's orders, as its processes read them from their command line."""

    name: str  # in tables
    contender: str  # a key of worker.CONTENDERS
    flags: tuple[str, ...]  # of pretrain/train.py
    device_kind: str
    cores: tuple[tuple[int, ...], ...]  # of each rank: how many ranks there are
    options: dict[str, Any]

    @property
    def device(self) -> Device:
        return cpu_device() if self.device_kind == "cpu" else cuda_device()

    def option(self, name: str) -> Any:
        return self.options[name]

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        return cls(**{**values, "flags": tuple(values["flags"]), "cores": tuple(map(tuple, values["cores"]))})

    def plan(self) -> Plan:
        """The run that the flags describe, judged as train.py would. Raises ConfigError."""
        return check_run(parse_arguments(list(self.flags)), world_size=len(self.cores), device=self.device)


def ds_config(settings: Settings, *, micro_batch_size: int, gradient_accumulation_steps: int,
              stages: int) -> dict[str, Any]:
    """Plain DeepSpeed, nothing left at "auto": ZeRO-1, AdamW, clipping."""
    params: dict[str, Any] = {"lr": LEARNING_RATE, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    if settings.device.kind == "cuda" and not has_nvcc():
        params["torch_adam"] = True  # DeepSpeed's own would be compiled with nvcc
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
    """Random tokens, frequent ones and rare ones as in text (Zipf's law), so that there is something to learn."""
    numbers = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16 if vocab_size < 65500 else np.int32) as writer:
        for _ in range(0, tokens, _DOCUMENT_TOKENS):
            drawn = vocab_size ** numbers.random(_DOCUMENT_TOKENS)  # density 1 / token
            writer.add_document(np.minimum(drawn.astype(np.int64), vocab_size) - 1)
        writer.finalize({"vocab_size": vocab_size, "max_token": vocab_size - 1})


def _overrides(settings: Settings) -> str:
    return settings.preset.overrides.format(positions=settings.preset.seq_length)


def model_of(settings: Settings) -> ModelConfig:
    """The preset's model, with positions for its sequence length."""
    return load_model_config(settings.preset.model, _overrides(settings) or None)


def shape(settings: Settings) -> str:
    """The model and the batch in a line."""
    model, preset = model_of(settings), settings.preset
    return f"{model.num_parameters() / 1e6:,.1f} M parameters ({model.num_layers} layers, width {model.hidden_size}, " \
           f"vocabulary {model.vocab_size:,}), sequence {preset.seq_length:,}, micro-batch " \
           f"{preset.micro_batch_size}, {settings.precision}, ZeRO-1"


class Workshop:
    """A temporary folder with the corpus and the JSONs, and the jobs that use them."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.model, preset, overrides = model_of(settings), settings.preset, _overrides(settings)
        self._model_flags = [f"--model={preset.model}"] + ([f"--model_overrides={overrides}"] if overrides else [])
        write_corpus(folder / "corpus", self.model.vocab_size, max(200 * preset.seq_length, 2_000_000))

    def job(self, name: str, contender: str, *, ranks: int = 1, first_core: int = 0, cores_for: int | None = None,
            micro_batch_size: int | None = None, gradient_accumulation_steps: int = 1, stages: int = 1,
            **options: Any) -> Job:
        """One contender's orders.

        Args:
            ranks: processes of it.
            cores_for: on a CPU each rank gets cores / cores_for cores (default: cores / ranks).
            first_core: the first rank's place among those shares.
        """
        settings = self.settings
        path = self.folder / f"{name.replace(' ', '_').replace('/', '_')}.json"
        path.write_text(json.dumps(ds_config(
            settings, micro_batch_size=micro_batch_size or settings.preset.micro_batch_size, stages=stages,
            gradient_accumulation_steps=gradient_accumulation_steps)))
        flags = [f"--deepspeed_config={path}", *self._model_flags, f"--train_data={self.folder / 'corpus'}",
                 "--split=1", f"--seq_length={settings.preset.seq_length}", "--train_steps=1000000",
                 "--lr_schedule=constant", "--lr_warmup_steps=0", "--save_interval=0", "--eval_interval=0",
                 f"--save={path.with_suffix('')}-run", *(settings.extra if contender in OURS else ())]
        cores = tuple(tuple(settings.cores_of(first_core + rank, cores_for or ranks)) for rank in range(ranks))
        return Job(name, contender, tuple(flags), settings.device.kind, cores,
                   {"ds_config": str(path), "precision": settings.precision,
                    "first_device": first_core if settings.device.kind == "cuda" else 0, **options})
