"""Flags of the training recipe: length, schedule, values for "auto" in the DeepSpeed JSON, speed."""

import argparse
from dataclasses import dataclass, field
from typing import ClassVar

from pretrain.config.flags.flag import flag


@dataclass(frozen=True)
class ScheduleArguments:
    title: ClassVar[str] = "length and schedule"

    train_steps: int | None = flag(None, "optimizer steps of the whole run", unset="this or --train_tokens: required")
    train_tokens: int | None = flag(None, "tokens of the whole run, such as 2.5B",
                                    unset="this or --train_steps: required")
    batch_schedule: str | None = flag(None, "begin with smaller global batches: 0:64,1e9:128,4e9:256 means 64 samples "
                                            "a step from the start, 128 after 1e9 tokens, ...; the last one is the "
                                            "global batch size of the run", metavar="TOKENS:BATCH,...",
                                      unset="always train_batch_size")
    lr_schedule: str = flag("cosine", "learning-rate schedule: cosine, linear, constant, wsd (warm-up, stable, "
                                      "decay), inverse_sqrt, step or one_cycle", metavar="NAME")
    lr_warmup_steps: int | None = flag(None, "steps from 0 to the peak rate", unset="1% of the run; one_cycle: 30%")
    lr_warmup_tokens: int | None = flag(None, "the same in tokens", unset="--lr_warmup_steps")
    lr_decay_steps: int | None = flag(None, "step at which the lowest rate is reached", unset="the run's last")
    lr_decay_tokens: int | None = flag(None, "the same in tokens", unset="--lr_decay_steps")
    lr_wsd_steps: int | None = flag(None, "steps of the final decay of wsd", unset="20% of the run")
    lr_wsd_tokens: int | None = flag(None, "the same in tokens", unset="--lr_wsd_steps")
    lr_decay_shape: str | None = flag(None, "shape of the final decay of wsd: linear, sqrt, 1-sqrt or cosine",
                                      metavar="NAME", unset="linear")
    lr_milestones: str | None = flag(None, "numbers of steps after which step multiplies the rate: 8000,9000",
                                     metavar="STEP,...", unset="with step: required")
    lr_milestone_tokens: str | None = flag(None, "the same in tokens: 8e9,9e9", metavar="TOKENS,...",
                                           unset="--lr_milestones")
    lr_milestone_factor: float | None = flag(None, "factor by which step multiplies the rate", unset="0.1")
    min_lr_ratio: float | None = flag(None, "lowest learning rate, as a fraction of the peak rate",
                                      unset="0.1; inverse_sqrt and step: 0; one_cycle: 4e-06")
    min_lr: float | None = flag(None, "the same as a rate", unset="--min_lr_ratio")
    lr_reference_batch: int | None = flag(None, "global batch size for which the peak rate was tuned; --lr_scaling "
                                                "scales it to the batch of this run", unset="no scaling")
    lr_scaling: str | None = flag(None, "with --lr_reference_batch: multiply the peak rate by the ratio of the two "
                                        "batches (linear), or by its square root (sqrt)", metavar="linear|sqrt",
                                  unset="no scaling")
    seed: int = flag(1234, "seed of initial weights, data order and dropout")


@dataclass(frozen=True)
class AutoArguments:
    """The defaults in these help texts are those of `auto.py`."""

    title: ClassVar[str] = 'values for "auto"'
    description: ClassVar[str] = ('Each fills a key that the DeepSpeed JSON leaves out or at "auto", and is rejected '
                                  'where the JSON has another value. The default is that of "auto".')

    micro_batch_size: int | None = flag(None, "train_micro_batch_size_per_gpu, samples", unset="1")
    gradient_accumulation_steps: int | None = flag(None, "gradient_accumulation_steps", unset="1")
    global_batch_size: int | None = flag(None, "train_batch_size: samples a step, all ranks together",
                                         unset="follows from the two above")
    learning_rate: float | None = flag(None, 'optimizer.params.lr, the peak rate; required if the JSON has no '
                                             '"optimizer"', unset="0.0003")
    weight_decay: float | None = flag(None, "optimizer.params.weight_decay, applied to matrices only", unset="0.1")
    adam_beta1: float | None = flag(None, "optimizer.params.betas[0]", unset="0.9")
    adam_beta2: float | None = flag(None, "optimizer.params.betas[1]", unset="0.95")
    adam_epsilon: float | None = flag(None, "optimizer.params.eps", unset="1e-08")
    gradient_clipping: float | None = flag(None, "gradient_clipping, the largest global norm", unset="1.0")
    precision: str | None = flag(None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32", unset="bf16",
                                 metavar="NAME")
    nvme_path: str | None = flag(None, "offload_*.nvme_path: a folder on a fast local disk", metavar="FOLDER",
                                 unset="the variable DS_PRETRAIN_NVME_PATH")


@dataclass(frozen=True)
class SpeedArguments:
    title: ClassVar[str] = "speed, memory and debugging"

    compile_blocks: bool = flag(False, "torch.compile each block; for cuda, where it fuses what lies between the "
                                       "matrix products")
    recompute: str | None = flag(None, "recompute activations in the backward pass, which takes less memory and more "
                                       "time: attention or mlp of each block, complete blocks, or none",
                                 unset="what pipeline.activation_checkpoint_interval says", metavar="PART")
    recompute_every: int = flag(1, "recompute the part in every N-th block only")
    mlp_tiles: int = flag(1, "compute each MLP in N pieces of the sequences, and recompute them in the backward pass: "
                             "for very long sequences")
    tf32: bool = flag(False, "multiply fp32 matrices in TF32 (fp32 runs on cuda): faster, 10 bits of mantissa")
    plain_operators: bool = flag(False, "disable the custom kernels for attention and MLP: slower, and more memory "
                                        "than is predicted")
    emulate_fp16: bool = flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = flag(None, "peak TFLOP/s of one device in this precision, for MFU",
                                     unset="known from the GPU's name")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})  # set by DeepSpeed's launcher


@dataclass(frozen=True)
class RecipeArguments:
    title: ClassVar[str] = "optimizer, loss and gradients"

    label_smoothing: float = flag(0.0, "probability that the target spreads evenly over the vocabulary, in the "
                                       "gradient; the reported loss remains the cross-entropy")
    z_loss: float = flag(0.0, "coefficient of the mean squared logsumexp of the logits, in the gradient, such as 1e-4")
    router_aux_loss: float | None = flag(None, "coefficient of the load-balancing loss of the experts, in the gradient",
                                         unset="router_aux_loss_coef of the config.json")
    router_z_loss: float = flag(0.0, "coefficient of the mean squared logsumexp of the routers' logits, in the "
                                     "gradient, such as 1e-3")
    expert_capacity_factor: float = flag(0.0, "in training, an expert processes at most this factor times the mean "
                                              "number of tokens, and drops the least probable others; 0: no limit")
    no_weight_decay: list[str] | None = flag(  # noqa: RUF009
        None, "parameters without weight decay: names, with * for any text, or the word embeddings", metavar="NAME",
        unset="vectors: norms and biases")
    gradient_value_clipping: float = flag(0.0, "largest absolute value of an element of the gradient, applied before "
                                               "the norm is computed and clipped; 0: no limit")
    adaptive_clipping: float = flag(0.0, "clip the gradient norm at this percentile of the norms of past updates, such "
                                         "as 90, and never above the JSON's gradient_clipping; 0: off",
                                    metavar="PERCENTILE")
    adaptive_clipping_window: int = flag(100, "number of past updates for --adaptive_clipping; until this number "
                                              "is reached, gradient_clipping applies")
    noise_scale_interval: int = flag(0, "estimate the gradient noise scale every N steps (McCandlish et al. 2018); "
                                        "0: never")
    early_stopping_patience: int = flag(0, "end the run after N evaluations in a row without a lower validation loss; "
                                           "0: off")
    early_stopping_min_delta: float = flag(0.0, "smallest decrease of the validation loss that counts for "
                                                "--early_stopping_patience")
