"""RunArguments: the flags of a run, each one declared here with its default, help, range and choices.

Settings of the DeepSpeed JSON (batch sizes, precision, ZeRO, optimizer, clipping) have no flags. The exceptions are in
the group AUTO: these flags fill keys that the JSON leaves out or sets to "auto".
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pretrain.active_extensions import extensions, for_each_extension, types_of
from pretrain.cli import LONGEST_SECONDS, path_text
from pretrain.config.flags.flag import Flag, Group, tokens
from pretrain.config.schedule import DECAY_SHAPES, KINDS, LR_SCALINGS
from pretrain.data.data_spec import DataSpec, parse_data_spec
from pretrain.errors import ConfigError
from pretrain.extension import Extension
from pretrain.model.init_methods import INIT_METHODS
from pretrain.model.recompute import PARTS
from pretrain.old_names import OLD_NAMES

# names of --override -> the settings of a checkpoint that they allow to change
OVERRIDES = {
    "lr": "the peak learning rate",
    "schedule": "the learning-rate schedule",
    "weight_decay": "weight decay, and the parameters that have none",
    "betas": "betas or momentum of the optimizer",
    "eps": "epsilon of the optimizer",
    "clipping": "gradient clipping",
    "loss": "label smoothing, z-loss, losses of the routers, and capacity of the experts",
    "dropout": "dropout",
    "batch": "the global batch size",
    "data": "training data, its blend and order, and the tokenizer",
    "samples": "which samples are left out, or read in another order",
    "seed": "the seed of data order and dropout",
}
LONGEST_NOTE = 2000  # characters
_SHORTEST_SPIKE_WINDOW = 16  # steps; fewer give no usual deviation

MODEL = Group("model and run folder")
DATA = Group("data")
SCHEDULE = Group("length and schedule")
RECIPE = Group("optimizer, loss and gradients")
INITIAL = Group("initial weights and dropout", "Settings of the training only: an exported config.json does not "
                                               "change.")
LOGGING = Group("evaluation and logging")
CHECKPOINTS = Group("checkpoints")
CHANGES = Group("changes of a run")
FAILURES = Group("when something goes wrong")
AUTO = Group('values for "auto"', 'Each fills a key that the DeepSpeed JSON leaves out or at "auto", and is rejected '
                                  'where the JSON has another value. The default is that of "auto".')
SPEED = Group("speed, memory and debugging")

_Settings = TypeVar("_Settings")


@dataclass(frozen=True)
class RunArguments:
    """All flags of a run, in the order of --help; those of extensions follow in `extensions`."""

    deepspeed_config: str = MODEL.flag(
        "", 'DeepSpeed JSON file; comments and "auto" values are allowed', parse=path_text, metavar="FILE",
        unset="required")
    model: str = MODEL.flag(
        "", "preset such as gpt2, a transformers config.json, a folder that holds one, or a repository of the Hub "
        "(org/name); or a config class of your own code, such as my_model:MyConfig", parse=path_text, metavar="NAME",
        unset="without --init_from: required")
    model_overrides: str | None = MODEL.flag(
        None, "changes to the config.json, under its own keys: n_layer=4,vocab_size=8000", metavar="CHANGES")
    model_code: str | None = MODEL.flag(
        None, "your own code for the model_type of --model: a subclass of transformers' PreTrainedConfig in a module "
        "with its model; --model my_model:MyConfig alone takes the defaults of that class", metavar="my_model:MyConfig")
    init_from: str | None = MODEL.flag(
        None, "start at step 0 from these weights: a transformers folder with safetensors, a repository of the Hub "
        "(org/name), a run folder or a global_stepN folder", parse=path_text, metavar="SOURCE", unset="random weights")
    save: str = MODEL.flag(
        "", "run folder: checkpoints, metrics.jsonl, run.json, events.jsonl", parse=path_text, metavar="RUN",
        unset="required")
    extension: list[str] | None = MODEL.flag(  # noqa: RUF009
        None, "load an extension of your own code, with flags, callbacks or subcommands; several are separated by "
        "spaces; `ds-pretrain extensions` lists those that are installed", metavar="my_module:EXTENSION")

    train_data: list[str] | str = DATA.flag(  # noqa: RUF009
        "", "prefix of the .bin/.idx pair to train on; several prefixes are blended: WEIGHT PREFIX WEIGHT PREFIX ..., "
        "or prefixes alone, in proportion to their tokens", metavar="PREFIX",
        unset="this or --dataset_module: required")
    valid_data: list[str] | None = DATA.flag(  # noqa: RUF009
        None, "prefix of a separate validation pair; several sets, [NAME=]PREFIX ..., are evaluated and logged by name",
        metavar="PREFIX", unset="a part of --train_data, as --split says")
    test_data: list[str] | None = DATA.flag(  # noqa: RUF009
        None, "the same for test pairs, evaluated once at the end", metavar="PREFIX",
        unset="a part of --train_data, as --split says")
    blend_schedule: list[str] | None = DATA.flag(  # noqa: RUF009
        None, "other weights of a blend from numbers of consumed tokens on, such as 0:0.9,0.1 10e9:0.5,0.5",
        metavar="FROM_TOKENS:W1,W2,...")
    split: str = DATA.flag(
        "969,30,1", "proportions of train, valid and test documents in --train_data", metavar="TRAIN,VALID,TEST")
    sample_order: str = DATA.flag(
        "shuffled", "order of the samples: shuffled, or that of megatron or neox, to continue a run of Megatron-LM or "
        "GPT-NeoX, and others of extensions", metavar="NAME")
    packing: str = DATA.flag(
        "none", "none: documents follow one another without padding; best_fit: only documents that are longer than a "
        "sample are divided, and the others are packed with little padding", metavar="NAME")
    dataset_module: str | None = DATA.flag(
        None, "your own code instead of --train_data: the function build of my_data.py returns datasets with "
        "__len__, __getitem__ and fingerprint", metavar="my_data:build")
    dataset_args: str | None = DATA.flag(
        None, 'arguments of the function of --dataset_module, as a JSON object such as {"path": "numbers.npy"}',
        metavar="JSON")
    first_sample: int = DATA.flag(
        0, "sample with which a run begins at step 0: the number of samples that it consumed before it was moved here",
        low=0, high=2**48)
    order_samples: int | None = DATA.flag(
        None, "total number of samples for which Megatron-LM or GPT-NeoX made the order; only with --sample_order "
        "megatron or neox", low=1, high=2**48, unset="--first_sample and the samples of --train_steps")
    skip_samples: str | None = DATA.flag(
        None, "leave these samples of the training data out, by their places in its order: 41200,51000:51016 are one "
        "sample and 16; a branch (--resume_from) or a resume with --override samples may begin with it",
        override="samples", metavar="ID,FIRST:LAST,...")
    reorder_samples: str | None = DATA.flag(
        None, "read the samples of this range of places among one another in another order, such as 41200:51000; "
        "another seed gives another order", override="samples", metavar="FIRST:LAST[:SEED],...")
    tokenizer: str | None = DATA.flag(
        None, "SentencePiece .model file, a folder with it or with tokenizer.json, a repository (org/name), a preset's "
        "name such as gpt2, the word bytes, or what an extension reads; checked against data and model, and used by "
        "subcommands that read the run",
        parse=path_text, metavar="PATH")
    seq_length: int = DATA.flag(1024, "tokens in a sample", low=1)
    seq_length_schedule: str | None = DATA.flag(
        None, "begin with shorter sequences: 0:256,1e9:512,4e9:1024 means 256 tokens from the start, 512 after 1e9 "
        "tokens, ...; a sample is divided, so that no token is lost", metavar="TOKENS:LENGTH,...",
        unset="always --seq_length")
    eod_mask_loss: bool = DATA.flag(False, "ignore the prediction that follows an end-of-document token in the loss")
    document_attention: bool = DATA.flag(
        False, "attention sees only the tokens of the same document, and positions begin at 0 with each document, also "
        "when a sample contains several documents")

    train_steps: int | None = SCHEDULE.flag(
        None, "optimizer steps of the whole run", low=1, unset="this or --train_tokens: required")
    train_tokens: int | None = SCHEDULE.flag(
        None, "tokens of the whole run, such as 2.5B", parse=tokens, low=1, unset="this or --train_steps: required")
    batch_schedule: str | None = SCHEDULE.flag(
        None, "begin with smaller global batches: 0:64,1e9:128,4e9:256 means 64 samples a step from the start, 128 "
        "after 1e9 tokens, ...; the last one is the global batch size of the run", override="batch",
        metavar="TOKENS:BATCH,...", unset="always train_batch_size")
    lr_schedule: str = SCHEDULE.flag(
        "cosine", f"learning-rate schedule: {', '.join(KINDS)}; wsd is warm-up, stable, decay; or your own function, "
        "my_module:schedule", choices=tuple(KINDS), takes_code=True, metavar="NAME")
    lr_warmup_steps: int | None = SCHEDULE.flag(
        None, "steps from 0 to the peak rate", low=0, unset="1% of the run; one_cycle: 30%")
    lr_warmup_tokens: int | None = SCHEDULE.flag(
        None, "the same in tokens", parse=tokens, low=0, unset="--lr_warmup_steps")
    lr_decay_steps: int | None = SCHEDULE.flag(
        None, "step at which the lowest rate is reached", low=0, unset="the run's last")
    lr_decay_tokens: int | None = SCHEDULE.flag(
        None, "the same in tokens", parse=tokens, low=0, unset="--lr_decay_steps")
    lr_wsd_steps: int | None = SCHEDULE.flag(None, "steps of the final decay of wsd", low=0, unset="20% of the run")
    lr_wsd_tokens: int | None = SCHEDULE.flag(None, "the same in tokens", parse=tokens, low=0, unset="--lr_wsd_steps")
    lr_decay_shape: str | None = SCHEDULE.flag(
        None, "shape of the final decay of wsd: linear, sqrt, 1-sqrt or cosine", choices=DECAY_SHAPES, metavar="NAME",
        unset="linear")
    lr_milestones: str | None = SCHEDULE.flag(
        None, "numbers of steps after which step multiplies the rate: 8000,9000", metavar="STEP,...",
        unset="with step: required")
    lr_milestone_tokens: str | None = SCHEDULE.flag(
        None, "the same in tokens: 8e9,9e9", metavar="TOKENS,...", unset="--lr_milestones")
    lr_milestone_factor: float | None = SCHEDULE.flag(
        None, "factor by which step multiplies the rate", above=0, high=1, unset="0.1")
    min_lr_ratio: float | None = SCHEDULE.flag(
        None, "lowest learning rate, as a fraction of the peak rate", low=0, high=1,
        unset="0.1; inverse_sqrt and step: 0; one_cycle: 4e-06")
    min_lr: float | None = SCHEDULE.flag(None, "the same as a rate", low=0, unset="--min_lr_ratio")
    lr_counts_from_0: bool = SCHEDULE.flag(
        False, "number the steps of the schedule from 0, as transformers, Megatron-LM and GPT-NeoX do, so that a "
        "warm-up begins with the rate 0")
    lr_reference_batch: int | None = SCHEDULE.flag(
        None, "global batch size for which the peak rate was tuned; --lr_scaling scales it to the batch of this run",
        low=1, unset="no scaling")
    lr_scaling: str | None = SCHEDULE.flag(
        None, "with --lr_reference_batch: multiply the peak rate by the ratio of the two batches (linear), or by its "
        "square root (sqrt)", choices=LR_SCALINGS, unset="no scaling")
    seed: int = SCHEDULE.flag(1234, "seed of initial weights, data order and dropout", low=0, high=2**31 - 1)

    loss: str | None = RECIPE.flag(
        None, "your own loss of training: the function gets logits and labels of tokens and returns a loss for each; "
        "evaluations report the cross-entropy", override="loss", metavar="my_module:loss", unset="cross-entropy")
    label_smoothing: float = RECIPE.flag(
        0.0, "probability that the target spreads evenly over the vocabulary, in the gradient; the reported loss "
        "remains the cross-entropy", low=0, high=1, override="loss")
    z_loss: float = RECIPE.flag(
        0.0, "coefficient of the mean squared logsumexp of the logits, in the gradient, such as 1e-4", low=0, high=1,
        override="loss")
    router_aux_loss: float | None = RECIPE.flag(
        None, "coefficient of the load-balancing loss of the experts, in the gradient", low=0, high=1000,
        override="loss", unset="router_aux_loss_coef of the config.json")
    router_z_loss: float = RECIPE.flag(
        0.0, "coefficient of the mean squared logsumexp of the routers' logits, in the gradient, such as 1e-3", low=0,
        high=1000, override="loss")
    expert_capacity_factor: float = RECIPE.flag(
        0.0, "in training, an expert processes at most this factor times the mean number of tokens, and drops the "
        "least probable others; 0: no limit", low=0, high=1e6, override="loss")
    no_weight_decay: list[str] | None = RECIPE.flag(  # noqa: RUF009
        None, "parameters without weight decay: names, with * for any text, or the word embeddings", metavar="NAME",
        unset="vectors: norms and biases")
    decay_vectors: bool = RECIPE.flag(
        False, "weight decay for vectors (norms, biases) as for matrices, as in an optimizer that was made from all "
        "parameters of a model; --no_weight_decay then names vectors, too", override="weight_decay")
    gradient_value_clipping: float = RECIPE.flag(
        0.0, "largest absolute value of an element of the gradient, applied before the norm is computed and clipped; "
        "0: no limit", low=0, high=1e6, override="clipping")
    adaptive_clipping: float = RECIPE.flag(
        0.0, "clip the gradient norm at this percentile of the norms of past updates, such as 90, and never above the "
        "JSON's gradient_clipping; 0: off", low=0, high=100, override="clipping", metavar="PERCENTILE")
    adaptive_clipping_window: int = RECIPE.flag(
        100, "number of past updates for --adaptive_clipping; until this number is reached, gradient_clipping applies",
        low=1, high=10_000, override="clipping")
    noise_scale_interval: int = RECIPE.flag(
        0, "estimate the gradient noise scale every N steps (McCandlish et al. 2018); 0: never", low=0)
    early_stopping_patience: int = RECIPE.flag(
        0, "end the run after N evaluations in a row without a lower validation loss; 0: off", low=0)
    early_stopping_min_delta: float = RECIPE.flag(
        0.0, "smallest decrease of the validation loss that counts for --early_stopping_patience", low=0)

    init_method: str = INITIAL.flag(
        "config", "initial values of matrices: config (as the config.json says), normal, scaled_normal, small_init, "
        "wang_init, xavier_normal or xavier_uniform", choices=INIT_METHODS, metavar="NAME")
    output_init_method: str = INITIAL.flag(
        "config", "the same for the projections into the residual stream", choices=INIT_METHODS, metavar="NAME")
    init_std: float | None = INITIAL.flag(
        None, "standard deviation of config, normal and scaled_normal", above=0, high=1000,
        unset="initializer_range of the config.json")
    mup_base_width: int | None = INITIAL.flag(
        None, "muP: hidden size of the smaller model whose learning rate and standard deviation were tuned", low=1,
        unset="without muP")
    embedding_dropout: float | None = INITIAL.flag(
        None, "dropout of the embeddings", low=0, below=1, unset="that of the config.json")
    attention_dropout: float | None = INITIAL.flag(
        None, "dropout of the attention probabilities", low=0, below=1, unset="that of the config.json")
    residual_dropout: float | None = INITIAL.flag(
        None, "dropout of the outputs of attention and MLP", low=0, below=1, unset="that of the config.json")

    log_interval: int = LOGGING.flag(
        10, "steps between two logged steps: a line of output and a row of metrics.jsonl", low=1)
    eval_interval: int = LOGGING.flag(1000, "steps between two evaluations; 0: only at the end", low=0)
    eval_steps: int = LOGGING.flag(10, "global batches in an evaluation", low=1)
    note: str | None = LOGGING.flag(
        None, "why this run: a text that run.json, the report, `ds-pretrain summary` and the monitors show; a resume "
        "may change it", metavar="TEXT")
    trackio: str | None = LOGGING.flag(
        None, "Trackio project that gets the values of metrics.jsonl, as the monitors of the DeepSpeed JSON do; needs "
        "the package trackio", metavar="PROJECT")
    deepspeed_log_level: str = LOGGING.flag(
        "error", "DeepSpeed's own messages: debug, info, warning or error",
        choices=("debug", "info", "warning", "error"), metavar="LEVEL")

    save_interval: int = CHECKPOINTS.flag(1000, "steps between two checkpoints; 0: only at the end", low=0)
    resume: str = CHECKPOINTS.flag(
        "auto", "auto: from the newest checkpoint if there is one; required: never from step 0; never: only into a run "
        "folder without checkpoints", choices=("auto", "required", "never"))
    exit_step: int | None = CHECKPOINTS.flag(
        None, "save and stop after this step, before the run's end", above=0)
    async_save: bool = CHECKPOINTS.flag(False, "copy a checkpoint to host memory and write it while training continues")
    save_busy: str = CHECKPOINTS.flag(
        "wait", "while the previous --async_save is still being written: wait, or skip the new one",
        choices=("wait", "skip"))
    save_timeout: float = CHECKPOINTS.flag(
        1800, "seconds after which a background save counts as failed; also the --step_timeout of saving and loading",
        above=0, high=LONGEST_SECONDS)
    keep_checkpoints: int = CHECKPOINTS.flag(0, "number of newest checkpoints to keep, at least 2; 0: keep all", low=0)
    keep_every: int = CHECKPOINTS.flag(0, "with --keep_checkpoints: also keep those of every N-th step; 0: none", low=0)
    keep_best: int = CHECKPOINTS.flag(
        0, "with --keep_checkpoints: also keep the N of lowest validation loss (of several sets: their mean); 0: none",
        low=0)
    checkpoint_mirror: str | None = CHECKPOINTS.flag(
        None, "folder or fsspec URL (s3://...) that receives a copy of each checkpoint; a start takes one from there "
        "if --save has none as recent", parse=path_text, metavar="URL")

    override: list[str] | None = CHANGES.flag(  # noqa: RUF009
        None, "settings that may differ from those of the checkpoint that the run resumes from: "
        f"{', '.join(OVERRIDES)}; several are separated by commas", metavar="NAME,...")
    resume_from: str | None = CHANGES.flag(
        None, "checkpoint of another run that this run continues if --save has none of its own: a run folder for its "
        "newest, RUN@STEP, or a global_stepN folder", parse=path_text, metavar="RUN@STEP")

    exit_after_minutes: float | None = FAILURES.flag(
        None, "save and stop with exit code 75 after this time since the start of the process; the save comes after "
        "this time", above=0, high=LONGEST_SECONDS / 60, unset="no limit")
    spike_policy: str = FAILURES.flag(
        "warn", "after a spike of the loss or the gradient norm: warn; skip this update; or rollback: return to the "
        "newest good checkpoint from before it and skip the samples since then", choices=("warn", "skip", "rollback"))
    spike_threshold: float = FAILURES.flag(
        6.0, "deviations above the usual value that count as a spike; both are medians of the window", above=0,
        high=1e6)
    spike_window: int = FAILURES.flag(
        128, "steps of which the usual value and deviation are known; no step counts as a spike before half of them "
        "are", low=_SHORTEST_SPIKE_WINDOW, high=2**20)
    max_bad_steps: int = FAILURES.flag(
        5, "bad steps in a row (NaN, infinity, or an update that --spike_policy skip left out), after which the run "
        "returns to the newest good checkpoint from before them", low=1)
    rollback_skip_steps: int = FAILURES.flag(
        0, "a rollback also skips the samples of this number of steps after the bad ones", low=0)
    max_rollbacks: int = FAILURES.flag(
        3, "rollbacks of the whole run; instead of a further one it stops with exit code 76", low=0)
    step_timeout: float = FAILURES.flag(
        600, "seconds that the data of a step, the step itself, or a batch of an evaluation may take; then all ranks "
        "write their stacks and exit with code 77; 0: no limit", low=0, high=LONGEST_SECONDS)
    first_step_timeout: float = FAILURES.flag(
        1800, "the same for the first step and the first batch of an evaluation, which may compile, and for each phase "
        "before the first step: connecting, verifying the checkpoint, building the engine", low=0, high=LONGEST_SECONDS)
    replica_check_interval: int = FAILURES.flag(
        100, "steps between two comparisons of the copies of the parameters on different ranks; 0: never", low=0)
    allow_other_data: bool = FAILURES.flag(
        False, "the same as --override data: resume although --train_data or --tokenizer is not that of the checkpoint")

    micro_batch_size: int | None = AUTO.flag(
        None, "train_micro_batch_size_per_gpu, samples", low=1, unset=1)
    gradient_accumulation_steps: int | None = AUTO.flag(
        None, "gradient_accumulation_steps", low=1, unset=1)
    global_batch_size: int | None = AUTO.flag(
        None, "train_batch_size: samples a step, all ranks together", low=1, unset="follows from the two above")
    learning_rate: float | None = AUTO.flag(
        None, 'optimizer.params.lr, the peak rate; required if the JSON has no "optimizer"', above=0, high=1000,
        unset=3e-4)
    weight_decay: float | None = AUTO.flag(
        None, "optimizer.params.weight_decay, applied to matrices", low=0, high=1000,
        unset=0.1)
    adam_beta1: float | None = AUTO.flag(
        None, "optimizer.params.betas[0]", low=0, below=1, unset=0.9)
    adam_beta2: float | None = AUTO.flag(
        None, "optimizer.params.betas[1]", low=0, below=1, unset=0.95)
    adam_epsilon: float | None = AUTO.flag(None, "optimizer.params.eps", low=1.1e-19, high=1, unset=1e-8)
    gradient_clipping: float | None = AUTO.flag(
        None, "gradient_clipping, the largest global norm", low=0, unset=1.0)
    precision: str | None = AUTO.flag(
        None, "bf16.enabled and fp16.enabled: bf16, fp16 or fp32", metavar="NAME",
        unset="bf16")
    nvme_path: str | None = AUTO.flag(
        None, "offload_*.nvme_path: a folder on a fast local disk", parse=path_text, metavar="FOLDER",
        unset="the variable DS_PRETRAIN_NVME_PATH")

    compile_blocks: bool = SPEED.flag(
        False, "torch.compile each block; for cuda, where it fuses what lies between the matrix products")
    recompute: str | None = SPEED.flag(
        None, "recompute activations in the backward pass, which takes less memory and more time: attention or mlp of "
        "each block, complete blocks, or none", choices=PARTS, metavar="PART",
        unset="what pipeline.activation_checkpoint_interval says")
    recompute_every: int = SPEED.flag(1, "recompute the part in every N-th block only", low=1)
    mlp_tiles: int = SPEED.flag(
        1, "compute each MLP in N pieces of the sequences, and recompute them in the backward pass: for very long "
        "sequences", low=1)
    tf32: bool = SPEED.flag(False, "multiply fp32 matrices in TF32 (fp32 runs on cuda): faster, 10 bits of mantissa")
    plain_operators: bool = SPEED.flag(
        False, "disable the custom kernels for attention and MLP: slower, and more memory")
    deterministic: bool = SPEED.flag(
        False, "make a run on GPUs bit-reproducible: only operators that give the same bits each time, which are "
        "slower; runs on CPUs are so without the flag, except for the choice of C kernels")
    emulate_fp16: bool = SPEED.flag(False, "run fp16 on a device that has none: very slow, for tests and debugging")
    peak_tflops: float | None = SPEED.flag(
        None, "peak TFLOP/s of one device in this precision, for MFU", above=0, high=1e6,
        unset="known from the GPU's name")

    local_rank: int = dataclasses.field(  # set by DeepSpeed's launcher
        default=-1, metadata={"flag": Flag(SPEED, argparse.SUPPRESS)})
    extensions: dict[str, Any] = dataclasses.field(default_factory=dict)  # flags of extensions that are given: values

    def of(self, settings: type[_Settings]) -> _Settings:
        """Return the settings of an extension, a dataclass whose fields are its flags."""
        names = {each.name for each in dataclasses.fields(settings)}  # type: ignore[arg-type]
        return settings(**{name: value for name, value in self.extensions.items() if name in names})

    def value(self, name: str) -> Any:
        """Return the value of any flag."""
        return getattr(self, name) if name in _CORE else self.extensions.get(name, DEFAULTS[name])

    def values(self) -> dict[str, Any]:
        """Return the values of all flags by name."""
        return {name: self.value(name) for name in FLAGS}

    @cached_property
    def data(self) -> DataSpec:
        """The data that the flags name. Raises ConfigError for values that cannot be combined."""
        return parse_data_spec(
            self.train_data, valid_data=self.valid_data, test_data=self.test_data, split=self.split,
            sample_order=self.sample_order, packing=self.packing, blend_schedule=self.blend_schedule,
            dataset_module=self.dataset_module, dataset_args=self.dataset_args,
            settings={each.name: self.of(each.settings) for each in extensions()
                      if each.token_files and each.settings is not None})


def arguments_of(values: Mapping[str, Any]) -> RunArguments:
    """Return the arguments with these values of flags, of the core and of extensions."""
    return RunArguments(**{name: value for name, value in values.items() if name in _CORE},
                        extensions={name: value for name, value in values.items() if name not in _CORE})


_CORE = [field.name for field in dataclasses.fields(RunArguments) if "flag" in field.metadata]
FLAGS: dict[str, Flag] = {}  # of the core, then of the extensions
TYPES: dict[str, Any] = {}
DEFAULTS: dict[str, Any] = {}


def _declare(fields: Iterable["dataclasses.Field[Any]"], types: Mapping[str, Any]) -> None:
    for field in fields:
        if "flag" in field.metadata:
            FLAGS[field.name], TYPES[field.name] = field.metadata["flag"], types[field.name]
            DEFAULTS[field.name] = field.default


def _declare_extension(extension: Extension) -> None:
    if both := sorted(extension.flags.keys() & {*_CORE, "config", "help", *OLD_NAMES}):
        raise ConfigError(f"extension {extension.name}", problem=f"a run has a flag --{both[0]} already",
                          remedy="give the extension's flag another name")
    _declare(extension.flags.values(), types_of(extension))


_declare(dataclasses.fields(RunArguments), typing.get_type_hints(RunArguments))
for_each_extension(_declare_extension)
