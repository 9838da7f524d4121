"""Loaders of a run: each rank reads the samples of its place in the engine's layout."""

from deepspeed import DeepSpeedEngine

from pretrain.config.validate import Plan
from pretrain.data.loader import Loader
from pretrain.engine.steps import data_parallel_rank, data_parallel_size, sum_over_data_parallel


def open_loader(engine: DeepSpeedEngine, plan: Plan, name: str) -> Loader:
    """Return the loader of the dataset `name` of the plan, such as "train" or "valid".

    --batch_schedule and --seq_length_schedule apply to "train" only.
    """
    is_training = name == "train"
    return Loader(plan.datasets[name], micro_batch_size=plan.layout.micro_batch_size,
                  gradient_accumulation_steps=plan.layout.gradient_accumulation_steps,
                  data_parallel_rank=data_parallel_rank(engine), data_parallel_size=data_parallel_size(engine),
                  eod_token=plan.eod_token if plan.args.eod_mask_loss else None,
                  sum_over_data_parallel=lambda value: sum_over_data_parallel(engine, value),
                  batch_size_at=plan.length.batch_sizes.at if is_training else None,
                  seq_length_at=plan.seq_lengths.at if is_training and plan.seq_lengths.stages else None,
                  document_end=plan.eod_token if plan.args.document_attention else None,
                  pin_memory=engine.device.type == "cuda")
