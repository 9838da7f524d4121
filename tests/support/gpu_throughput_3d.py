"""Published step times with tensor and pipeline parallelism (tests/golden/gpu_throughput_3d.csv), and predictions."""

from dataclasses import dataclass, replace

from pretrain.config.layout import Layout
from pretrain.memory.hardware import Cluster, make_cluster
from pretrain.memory.step_time.time_model import StepTime
from pretrain.memory.step_time.time_parameters import DEFAULT_PARAMETERS, TimeParameters
from tests.support.gpu_throughput import golden_rows, gpt2_shape, predict_step_time

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


def predict_step(row: StepMeasurement, parameters: TimeParameters = PARAMETERS_3D) -> StepTime:
    """Return the predicted time of a step."""
    shape = gpt2_shape(row.hidden_size, row.layers, row.heads, row.vocab_size, _SEQ_LENGTH)
    return predict_step_time(row.layout, row.cluster, shape, shape.num_parameters(), parameters)


def page_table_3d() -> list[str]:
    """Return a Markdown table with a line for each degrees and micro-batch: rows, and the range of their ratios.

    The ratio is predicted divided by measured speed, of the rows that were not used for the fit and of all rows.
    """
    rows = read_step_measurements()
    lines = ["| source, schedule | data x tensor x pipeline | micro-batch | rows | not used for the fit | all |",
             "| --- | --- | --- | --- | --- | --- |"]

    def text(found: list[StepMeasurement]) -> str:
        ratios = [row.seconds / predict_step(row).total_seconds for row in found]
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""

    for key in dict.fromkeys((row.source, row.schedule, row.data, row.tensor, row.pipeline, row.micro_batch_size)
                             for row in rows):
        own = [row for row in rows
               if key == (row.source, row.schedule, row.data, row.tensor, row.pipeline, row.micro_batch_size)]
        source, schedule, data, tensor, pipeline, micro = key
        lines.append(f"| {source}, {schedule} | {data} x {tensor} x {pipeline} | {micro} | {len(own)} | "
                     f"{text([row for row in own if row.is_test])} | {text(own)} |")
    return lines
