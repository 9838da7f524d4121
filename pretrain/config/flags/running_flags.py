"""Flags of a running job: evaluation, logging, checkpoints, and its reaction to failures."""

from dataclasses import dataclass
from typing import ClassVar

from pretrain.config.flags.flag import flag


@dataclass(frozen=True)
class LoggingArguments:
    title: ClassVar[str] = "evaluation and logging"

    log_interval: int = flag(10, "steps between two logged steps: a line of output and a row of metrics.jsonl")
    eval_interval: int = flag(1000, "steps between two evaluations; 0: only at the end")
    eval_steps: int = flag(10, "global batches in an evaluation")
    trackio: str | None = flag(None, "Trackio project that gets the values of metrics.jsonl, as the monitors of the "
                                     "DeepSpeed JSON do; needs the package trackio", metavar="PROJECT")
    deepspeed_log_level: str = flag("error", "DeepSpeed's own messages: debug, info, warning or error",
                                    metavar="LEVEL")


@dataclass(frozen=True)
class CheckpointArguments:
    title: ClassVar[str] = "checkpoints"

    save_interval: int = flag(1000, "steps between two checkpoints; 0: only at the end")
    resume: str = flag("auto", "auto: from the newest checkpoint if there is one; required: never from step 0; never: "
                               "only into a run folder without checkpoints", metavar="auto|required|never")
    exit_step: int | None = flag(None, "save and stop after this step, before the run's end; another name: "
                                        "--exit_at_step")
    async_save: bool = flag(False, "copy a checkpoint to host memory and write it while training continues")
    save_busy: str = flag("wait", "while the previous --async_save is still being written: wait, or skip the new one",
                          metavar="wait|skip")
    save_timeout: float = flag(1800, "seconds after which a background save counts as failed; also the --step_timeout "
                                     "of saving and loading")
    keep_checkpoints: int = flag(0, "number of newest checkpoints to keep, at least 2; 0: keep all")
    keep_every: int = flag(0, "with --keep_checkpoints: also keep those of every N-th step; 0: none")
    keep_best: int = flag(0, "with --keep_checkpoints: also keep the N of lowest validation loss (of several "
                            "sets: their mean); 0: none")
    checkpoint_mirror: str | None = flag(None, "folder or fsspec URL (s3://...) that receives a copy of each "
                                               "checkpoint; a start takes one from there if --save has none as recent",
                                         metavar="URL")


@dataclass(frozen=True)
class ResilienceArguments:
    title: ClassVar[str] = "when something goes wrong"

    exit_after_minutes: float | None = flag(None, "save and stop with exit code 75 after this time since the start of "
                                                  "the process; the save comes after this time", unset="no limit")
    spike_policy: str = flag("warn", "after a spike of the loss or the gradient norm: warn; skip this update; or "
                                     "rollback: return to the newest good checkpoint from before it and skip the "
                                     "samples since then", metavar="warn|skip|rollback")
    spike_threshold: float = flag(6.0, "standard deviations above the mean of the window that count as a spike")
    spike_window: int = flag(128, "steps in the window of mean and standard deviation; no step counts as a spike "
                                  "before half of it is filled")
    max_bad_steps: int = flag(5, "bad steps in a row (NaN, infinity, or an update that --spike_policy skip left out), "
                                 "after which the run returns to the newest good checkpoint from before them")
    rollback_skip_steps: int = flag(0, "a rollback also skips the samples of this number of steps after the bad ones")
    max_rollbacks: int = flag(3, "rollbacks of the whole run; instead of a further one it stops with exit code 76")
    step_timeout: float = flag(600, "seconds that the data of a step, the step itself, or a batch of an evaluation "
                                    "may take; then all ranks write their stacks and exit with code 77; 0: no limit")
    first_step_timeout: float = flag(1800, "the same for the first step and the first batch of an evaluation, which "
                                           "may compile, and for each phase before the first step: connecting, "
                                           "verifying the checkpoint, building the engine")
    replica_check_interval: int = flag(100, "steps between two comparisons of the copies of the parameters on "
                                            "different ranks; 0: never")
    allow_other_data: bool = flag(False, "the same as --override data: resume although --train_data or "
                                         "--tokenizer is not that of the checkpoint")


@dataclass(frozen=True)
class SteeringArguments:
    title: ClassVar[str] = "changes of a run"

    override: list[str] | None = flag(  # noqa: RUF009
        None, "settings that may differ from those of the checkpoint that the run resumes from: lr, schedule, "
        "weight_decay, betas, eps, clipping, loss, dropout, batch, data, seed; several are separated by commas",
        metavar="NAME,...")
    resume_from: str | None = flag(None, "checkpoint of another run that this run continues if --save has none of its "
                                         "own: a run folder for its newest, RUN@STEP, or a global_stepN folder",
                                   metavar="RUN@STEP")


@dataclass(frozen=True)
class InstrumentArguments:
    title: ClassVar[str] = "checks, measurements and profiles"

    sanity_check: bool = flag(False, "before step 1: run the checks of tools/sanity_check.py, and reject the run if "
                                     "one fails; a run that resumes is not checked again")

    profile_steps: str | None = flag(None, "steps to profile, the first and the last one, such as 10:12: each rank "
                                           "writes a trace and a table of operators to RUN/profiles; to profile a "
                                           "running job, `touch RUN/PROFILE`", metavar="FIRST:LAST")
    profile_ranks: str = flag("all", "ranks that write a profile, such as 0,8", metavar="all|RANK,...")
    pipeline_timeline: str | None = flag(None, "steps of a run with several pipeline stages, such as 10:12, whose time "
                                               "is divided into forward, backward, transfers and bubble: writes plots "
                                               "and a JSON to RUN/profiles", metavar="FIRST:LAST")
    memory_snapshot: bool = flag(False, "the profiled steps also write each allocation of GPU memory with its stack")
