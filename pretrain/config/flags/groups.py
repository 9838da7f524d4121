"""The flags of `pretrain/train.py`, in groups, with their defaults and help texts.

Settings of the DeepSpeed JSON (batch sizes, precision, ZeRO, optimizer, clipping) have no flags. The exceptions are in
`AutoArguments`: these flags fill keys that the JSON leaves out or sets to "auto".
"""

import argparse
from dataclasses import dataclass, field
from typing import Any, ClassVar


def _flag(default: Any, help: str, *, unset: str = "none", **metadata: str) -> Any:
    """Return a dataclass field whose help text ends with the default. `unset` is shown if there is no default."""
    if default is None or default == "":
        shown = unset
    else:
        shown = "off" if default is False else f"{default:g}" if isinstance(default, float) else str(default)
    shown = shown if "required" in shown else f"default: {shown}"
    return field(default=default, metadata={"help": f"{help} ({shown})".replace("%", "%%"), **metadata})


@dataclass(frozen=True)
class ModelArguments:
    title: ClassVar[str] = "model and run folder"

    deepspeed_config: str = _flag("", "DeepSpeed JSON file; comments and \"auto\" values are allowed", metavar="FILE",
                                  unset="required")
    model: str = _flag("", "preset such as gpt2, a transformers config.json, a folder that holds one, or a repository "
                           "of the Hub (org/name)", metavar="NAME",
                       unset="without --init_from: required")
    model_overrides: str | None = _flag(None, "changes to the config.json, under its own keys: "
                                              "n_layer=4,vocab_size=8000", metavar="CHANGES")
    init_from: str | None = _flag(None, "start at step 0 from these weights: a transformers folder with safetensors, a "
                                        "repository of the Hub (org/name), a run folder or a global_stepN folder",
                                  metavar="SOURCE", unset="random weights")
    save: str = _flag("", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl", metavar="RUN",
                      unset="required")


@dataclass(frozen=True)
class DataArguments:
    title: ClassVar[str] = "data"

    train_data: list[str] | str = _flag(  # noqa: RUF009
        "", "prefix of the .bin/.idx pair to train on; several prefixes are blended: WEIGHT PREFIX WEIGHT PREFIX ..., "
        "or prefixes alone, in proportion to their tokens", metavar="PREFIX", unset="required")
    valid_data: list[str] | None = _flag(  # noqa: RUF009
        None, "prefix of a separate validation pair; several sets, [NAME=]PREFIX ..., are evaluated and logged by name",
        metavar="PREFIX", unset="a part of --train_data, as --split says")
    test_data: list[str] | None = _flag(  # noqa: RUF009
        None, "the same for test pairs, evaluated once at the end", metavar="PREFIX",
        unset="a part of --train_data, as --split says")
    blend_schedule: list[str] | None = _flag(  # noqa: RUF009
        None, "other weights of a blend from numbers of consumed tokens on, such as 0:0.9,0.1 10e9:0.5,0.5",
        metavar="FROM_TOKENS:W1,W2,...")
    split: str = _flag("969,30,1", "proportions of train, valid and test documents in --train_data",
                       metavar="TRAIN,VALID,TEST")
    sample_order: str = _flag("shuffled", "order of the samples: shuffled, or that of megatron or neox, to continue a "
                                          "run of Megatron-LM or GPT-NeoX", metavar="NAME")
    packing: str = _flag("none", "none: documents follow one another without padding; best_fit: only documents that "
                                 "are longer than a sample are divided, and the others are packed with little padding",
                         metavar="NAME")
    first_sample: int = _flag(0, "sample with which a run begins at step 0: the number of samples that it consumed "
                                 "before it was moved here")
    order_samples: int | None = _flag(None, "total number of samples for which Megatron-LM or GPT-NeoX made the order; "
                                            "only with --sample_order megatron or neox",
                                      unset="--first_sample and the samples of --train_steps")
    tokenizer: str | None = _flag(None, "SentencePiece .model file, a folder with it or with tokenizer.json, or the "
                                        "word bytes; checked against data and model, and used by tools/generate.py",
                                  metavar="PATH")
    seq_length: int = _flag(1024, "tokens in a sample")
    seq_length_schedule: str | None = _flag(None, "begin with shorter sequences: 0:256,1e9:512,4e9:1024 means 256 "
                                                  "tokens from the start, 512 after 1e9 tokens, ...; a sample is "
                                                  "divided, so that no token is lost", metavar="TOKENS:LENGTH,...",
                                            unset="always --seq_length")
    eod_mask_loss: bool = _flag(False, "ignore the prediction that follows an end-of-document token in the loss")
    document_attention: bool = _flag(False, "attention sees only the tokens of the same document, and positions begin "
                                            "at 0 with each document, also when a sample contains several documents")


@dataclass(frozen=True)
class ScheduleArguments:
    title: ClassVar[str] = "length and schedule"

    train_steps: int | None = _flag(None, "optimizer steps of the whole run", unset="this or --train_tokens: required")
    train_tokens: int | None = _flag(None, "tokens of the whole run", unset="this or --train_steps: required")
    lr_schedule: str = _flag("cosine", "learning-rate schedule: cosine, linear, constant or wsd (warm-up, stable, "
                                       "decay)", metavar="NAME")
    lr_warmup_steps: int | None = _flag(None, "steps from 0 to the peak rate", unset="1% of the run")
    lr_decay_steps: int | None = _flag(None, "step at which the lowest rate is reached", unset="the run's last")
    lr_wsd_steps: int | None = _flag(None, "steps of the final decay of wsd", unset="20% of the run")
    min_lr_ratio: float = _flag(0.1, "lowest learning rate, as a fraction of the peak rate")
    seed: int = _flag(1234, "seed of initial weights, data order and dropout")


@dataclass(frozen=True)
class InitArguments:
    title: ClassVar[str] = "initial weights and dropout"
    description: ClassVar[str] = "Settings of the training only: an exported config.json does not change."

    init_method: str = _flag("config", "initial values of matrices: config (as the config.json says), normal, "
                                       "scaled_normal, small_init, wang_init, xavier_normal or xavier_uniform",
                             metavar="NAME")
    output_init_method: str = _flag("config", "the same for the projections into the residual stream", metavar="NAME")
    init_std: float | None = _flag(None, "standard deviation of config, normal and scaled_normal",
                                   unset="initializer_range of the config.json")
    mup_base_width: int | None = _flag(None, "muP: hidden size of the smaller model whose learning rate and "
                                             "standard deviation were tuned", unset="without muP")
    embedding_dropout: float | None = _flag(None, "dropout of the embeddings", unset="that of the config.json")
    attention_dropout: float | None = _flag(None, "dropout of the attention probabilities",
                                            unset="that of the config.json")
    residual_dropout: float | None = _flag(None, "dropout of the outputs of attention and MLP",
                                           unset="that of the config.json")


@dataclass(frozen=True)
class LoggingArguments:
    title: ClassVar[str] = "evaluation and logging"

    log_interval: int = _flag(10, "steps between two logged steps: a line of output and a row of metrics.jsonl")
    eval_interval: int = _flag(1000, "steps between two evaluations; 0: only at the end")
    eval_steps: int = _flag(10, "global batches in an evaluation")
    deepspeed_log_level: str = _flag("error", "DeepSpeed's own messages: debug, info, warning or error",
                                     metavar="LEVEL")


@dataclass(frozen=True)
class CheckpointArguments:
    title: ClassVar[str] = "checkpoints"

    save_interval: int = _flag(1000, "steps between two checkpoints; 0: only at the end")
    resume: str = _flag("auto", "auto: from the newest checkpoint if there is one; required: never from step 0; never: "
                                "only into a run folder without checkpoints", metavar="auto|required|never")
    exit_step: int | None = _flag(None, "save and stop after this step, before the run's end; another name: "
                                         "--exit_at_step")
    async_save: bool = _flag(False, "copy a checkpoint to host memory and write it while training continues")
    save_busy: str = _flag("wait", "while the previous --async_save is still being written: wait, or skip the new one",
                           metavar="wait|skip")
    save_timeout: float = _flag(1800, "seconds after which a background save counts as failed; also the --step_timeout "
                                      "of saving and loading")
    keep_checkpoints: int = _flag(0, "number of newest checkpoints to keep, at least 2; 0: keep all")
    keep_every: int = _flag(0, "with --keep_checkpoints: also keep those of every N-th step; 0: none")
    keep_best: int = _flag(0, "with --keep_checkpoints: also keep the N of lowest validation loss (of several "
                             "sets: their mean); 0: none")
    checkpoint_mirror: str | None = _flag(None, "folder or fsspec URL (s3://...) that receives a copy of each "
                                                "checkpoint; a start takes one from there if --save has none as recent",
                                          metavar="URL")


@dataclass(frozen=True)
class ResilienceArguments:
    title: ClassVar[str] = "when something goes wrong"

    exit_after_minutes: float | None = _flag(None, "save and stop with exit code 75 after this time since the start of "
                                                   "the process; the save comes after this time", unset="no limit")
    spike_policy: str = _flag("warn", "after a spike of the loss or the gradient norm: warn; skip this update; or "
                                      "rollback: return to the newest good checkpoint from before it and skip the "
                                      "samples since then", metavar="warn|skip|rollback")
    spike_threshold: float = _flag(6.0, "standard deviations above the mean of the window that count as a spike")
    spike_window: int = _flag(128, "steps in the window of mean and standard deviation; no step counts as a spike "
                                   "before half of it is filled")
    max_bad_steps: int = _flag(5, "bad steps in a row (NaN, infinity, or an update that --spike_policy skip left out), "
                                  "after which the run returns to the newest good checkpoint from before them")
    rollback_skip_steps: int = _flag(0, "a rollback also skips the samples of this number of steps after the bad ones")
    max_rollbacks: int = _flag(3, "rollbacks of the whole run; instead of a further one it stops with exit code 76")
    step_timeout: float = _flag(600, "seconds that the data of a step, the step itself, or a batch of an evaluation "
                                     "may take; then all ranks write their stacks and exit with code 77; 0: no limit")
    first_step_timeout: float = _flag(1800, "the same for the first step, which may compile, and for each phase "
                                            "before it: connecting, verifying the checkpoint, building the engine")
    replica_check_interval: int = _flag(100, "steps between two comparisons of the copies of the parameters on "
                                             "different ranks; 0: never")
    allow_other_data: bool = _flag(False, "resume although --train_data or --tokenizer is not that of the "
                                          "checkpoint")


@dataclass(frozen=True)
class AutoArguments:
    """The defaults in these help texts are those of `auto.py`."""

    title: ClassVar[str] = 'values for "auto"'
    description: ClassVar[str] = ('Each fills a key that the DeepSpeed JSON leaves out or at "auto", and is rejected '
                                  'where the JSON has another value. The default is that of "auto".')

    micro_batch_size: int | None = _flag(None, "train_micro_batch_size_per_gpu, samples", unset="1")
    gradient_accumulation_steps: int | None = _flag(None, "gradient_accumulation_steps", unset="1")
    global_batch_size: int | None = _flag(None, "train_batch_size: samples a step, all ranks together",
                                          unset="follows from the two above")
    learning_rate: float | None = _flag(None, 'optimizer.params.lr, the peak rate; required if the JSON has no '
                                              '"optimizer"', unset="0.0003")
    weight_decay: float | None = _flag(None, "optimizer.params.weight_decay, applied to matrices only", unset="0.1")
    adam_beta1: float | None = _flag(None, "optimizer.params.betas[0]", unset="0.9")
    adam_beta2: float | None = _flag(None, "optimizer.params.betas[1]", unset="0.95")
    adam_epsilon: float | None = _flag(None, "optimizer.params.eps", unset="1e-08")
    gradient_clipping: float | None = _flag(None, "gradient_clipping, the largest global norm", unset="1.0")
    precision: str | None = _flag(None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32", unset="bf16",
                                  metavar="NAME")
    nvme_path: str | None = _flag(None, "offload_*.nvme_path: a folder on a fast local disk", metavar="FOLDER",
                                  unset="the variable DS_PRETRAIN_NVME_PATH")


@dataclass(frozen=True)
class SpeedArguments:
    title: ClassVar[str] = "speed and debugging"

    compile_blocks: bool = _flag(False, "torch.compile each block; for cuda, where it fuses what lies between the "
                                        "matrix products")
    tf32: bool = _flag(False, "multiply fp32 matrices in TF32 (fp32 runs on cuda): faster, 10 bits of mantissa")
    plain_operators: bool = _flag(False, "disable the custom kernels for attention and MLP: slower, and more memory "
                                         "than is predicted")
    emulate_fp16: bool = _flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = _flag(None, "peak TFLOP/s of one device in this precision, for MFU",
                                      unset="known from the GPU's name")
    local_rank: int = field(default=-1, metadata={"help": argparse.SUPPRESS})  # set by DeepSpeed's launcher


GROUPS = (ModelArguments, DataArguments, ScheduleArguments, InitArguments, LoggingArguments, CheckpointArguments,
          ResilienceArguments, AutoArguments, SpeedArguments)
