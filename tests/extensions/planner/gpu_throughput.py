"""Published throughput of GPUs (tests/golden/gpu_throughput.csv), and the step-time model's prediction for each row."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from pretrain.config.layout import Layout
from pretrain.extensions.planner.step_time.time_model import StepTime, predict_step
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from tests.support.launch import ROOT

# model -> width, layers, heads (scripts/train/yamls/pretrain of the same repository); vocabulary 50,368, MLP 4 x width
MODELS = {"125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16),
          "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56)}
FITTED_GPU = "a100"  # the model's parameters were fitted to the rows of this GPU
# These runs computed attention by the first version of FlashAttention in Triton. Fitted; see TimeParameters.
TABLE_PARAMETERS = replace(DEFAULT_PARAMETERS, attention_speed=0.52)


@dataclass(frozen=True)
class Measurement:
    """One row of the table."""

    gpu: str
    model: str
    seq_length: int
    gpus: int
    micro_batch_size: int
    accumulation: int
    recompute: str
    num_parameters: int
    tokens_per_second: float  # of one GPU
    mfu: float

    @property
    def layout(self) -> Layout:
        """FSDP's full sharding communicates like ZeRO stage 3; it gathers each block twice in a micro-batch."""
        return Layout(world_size=self.gpus, zero_stage=3, precision="bf16", micro_batch_size=self.micro_batch_size,
                      gradient_accumulation_steps=self.accumulation, seq_length=self.seq_length,
                      recompute=self.recompute, overlap_comm=True, max_live_parameters=0, max_reuse_distance=0)

    @property
    def measured_seconds(self) -> float:
        return self.layout.tokens_per_step / self.gpus / self.tokens_per_second


def golden_rows(name: str) -> Iterator[dict[str, str]]:
    """Return the rows of a table in tests/golden/, whose comments begin with "#"."""
    lines = (ROOT / "tests/golden" / name).read_text().splitlines()
    return csv.DictReader(line for line in lines if not line.startswith("#"))


def read_measurements() -> list[Measurement]:
    """Read the table."""
    return [Measurement(row["gpu"], row["model"], int(row["seq_length"]), int(row["gpus"]),
                        int(row["micro_batch_size"]), int(row["accumulation"]), row["recompute"],
                        int(row["num_parameters"]), float(row["tokens_per_second_per_gpu"]),
                        float(row["mfu_percent"]) / 100) for row in golden_rows("gpu_throughput.csv")]


@cache
def gpt2_of_size(width: int, layers: int, heads: int, vocab_size: int, seq_length: int) -> ModelConfig:
    """Return a GPT-2 of this size, without dropout."""
    return model_config_from({
        "model_type": "gpt2", "vocab_size": vocab_size, "n_positions": seq_length, "n_embd": width, "n_layer": layers,
        "n_head": heads, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "gpt2")


def model_of_row(model: str, seq_length: int) -> ModelConfig:
    """Return one of MODELS: a GPT-2 of other sizes."""
    return gpt2_of_size(*MODELS[model], 50368, seq_length)


def predict(row: Measurement, parameters: TimeParameters = TABLE_PARAMETERS) -> StepTime:
    """Return the predicted time of a step."""
    cluster = make_cluster(gpu=row.gpu, world_size=row.gpus, nodes=None, gpus_per_node=None)
    return predict_step(row.layout, cluster, model_of_row(row.model, row.seq_length), parameters)


def throughput_table(parameters: TimeParameters = TABLE_PARAMETERS) -> list[str]:
    """Return the lines of a table: layout, measured and predicted tokens per second of a GPU, and their ratio."""
    lines = [f"{'gpu':8s} {'model':>5s} {'tokens':>6s} {'gpus':>4s} {'batch':>7s} {'recompute':9s} {'measured':>8s} "
             f"{'predicted':>9s} {'ratio':>5s}"]
    for row in read_measurements():
        ratio = row.measured_seconds / predict(row, parameters).total_seconds
        batch = f"{row.micro_batch_size} x {row.accumulation}"
        lines.append(f"{row.gpu:8s} {row.model:>5s} {row.seq_length:6d} {row.gpus:4d} {batch:>7s} {row.recompute:9s} "
                     f"{row.tokens_per_second:8,.0f} {row.tokens_per_second * ratio:9,.0f} {ratio:5.2f}")
    return lines
