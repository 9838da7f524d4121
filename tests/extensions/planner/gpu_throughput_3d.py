"""Published step times with tensor and pipeline parallelism (tests/golden/gpu_throughput_3d.csv), and predictions."""

from dataclasses import dataclass, replace

from pretrain.config.layout import Layout
from pretrain.extensions.planner.step_time.time_model import StepTime, predict_step
from pretrain.extensions.planner.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from pretrain.memory.hardware import Cluster, make_cluster
from tests.extensions.planner.gpu_throughput import golden_rows, gpt2_of_size

_SEQ_LENGTH = 2048
# GB/s of a GPU: four Omni-Path links of 100 Gb/s (Jean Zay) and eight InfiniBand links of 200 Gb/s (Selene) a node
_NETWORK_GBPS = {"bigscience": 6.25, "mt-nlg": 25.0}
# Attention without a fused kernel: scores are written to memory. Fitted; see TimeParameters.
PARAMETERS_3D = replace(DEFAULT_PARAMETERS, attention_speed=0.41)


@dataclass(frozen=True)
class StepMeasurement:
    """One row of the table."""

    index: int
    source: str
    schedule: str
    precision: str
    hidden_size: int
    layers: int
    heads: int
    vocab_size: int
    data: int
    tensor: int
    pipeline: int
    micro_batch_size: int
    global_batch_size: int
    seconds: float

    @property
    def is_test(self) -> bool:
        """Every third row is kept for the test."""
        return self.index % 3 == 2

    @property
    def layout(self) -> Layout:
        steps = self.global_batch_size // (self.data * self.micro_batch_size)
        return Layout(world_size=self.data * self.tensor * self.pipeline, zero_stage=1, precision=self.precision,
                      pipeline_stages=self.pipeline, tensor_parallel_size=self.tensor, seq_length=_SEQ_LENGTH,
                      micro_batch_size=self.micro_batch_size, gradient_accumulation_steps=steps,
                      recompute="blocks", grad_accum_dtype="fp32" if self.precision == "bf16" else "")

    @property
    def cluster(self) -> Cluster:
        return make_cluster(gpu="a100", world_size=self.layout.world_size, nodes=None, gpus_per_node=8,
                            network_gbps=_NETWORK_GBPS[self.source])


def read_step_measurements() -> list[StepMeasurement]:
    """Read the table."""
    return [StepMeasurement(index, row["source"], row["schedule"], row["precision"],
                            *(int(row[name]) for name in list(row)[3:-1]), float(row["seconds"]))
            for index, row in enumerate(golden_rows("gpu_throughput_3d.csv"))]


def predict_3d(row: StepMeasurement, parameters: TimeParameters = PARAMETERS_3D) -> StepTime:
    """Return the predicted time of a step."""
    model = gpt2_of_size(row.hidden_size, row.layers, row.heads, row.vocab_size, _SEQ_LENGTH)
    return predict_step(row.layout, row.cluster, model, parameters)


def throughput_table_3d() -> list[str]:
    """Return the lines of a table: data x tensor x pipeline parallel ranks, batch, measured seconds, and the ratio."""
    lines = ["source        degrees    micro-batch   seconds predicted ratio"]
    for row in read_step_measurements():
        predicted = predict_3d(row).total_seconds
        lines.append(f"{row.source:10s} {row.data:3d} x {row.tensor} x {row.pipeline:2d} {row.micro_batch_size:11d} "
                     f"{row.seconds:10.2f} {predicted:9.2f} {row.seconds / predicted:5.2f}")
    return lines
