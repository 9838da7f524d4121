"""Rules for the flags of a run, for monitors, profilers and folders."""

import importlib.util
from pathlib import Path

from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError
from pretrain.paths import check_folder

_ZERO = "zero_optimization"


def document_attention(run: ResolvedConfig) -> None:
    """Reject frequencies that depend on the length of a sequence: a document would differ from the same one alone."""
    if run.args.document_attention and run.args.seq_length > run.model.max_positions:
        raise ConfigError("--document_attention", found=f"--seq_length {run.args.seq_length} with dynamic RoPE scaling",
                          expected=f"at most {run.model.max_positions} tokens, the model's "
                                   f"{run.model.key('max_positions')}",
                          remedy="beyond them, the frequencies depend on the length of the sample; use a smaller "
                                 "--seq_length, or another rope_type")


def exit_step_within_run(run: ResolvedConfig) -> None:
    if run.args.exit_step is not None and run.args.exit_step > run.train_steps:
        raise ConfigError("--exit_step", found=run.args.exit_step,
                          expected=f"at most the run's {run.train_steps} steps")


def measuring(run: ResolvedConfig) -> None:
    for name, is_on in (("wall_clock_breakdown", run.get("wall_clock_breakdown")),
                        ("flops_profiler.enabled", run.get("flops_profiler.enabled"))):
        if is_on and run.layout.pipeline_stages > 1:
            raise run.error(name, expected=f"false with {run.layout.pipeline_stages} pipeline stages",
                            remedy="DeepSpeed's timers crash there")
    for name, package in (("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")):
        if run.get(f"{name}.enabled") and importlib.util.find_spec(package) is None:
            raise run.error(f"{name}.enabled", problem=f"it needs the package {package}, which is not installed",
                            remedy=f"pip install {package}")
    if run.args.trackio is not None and importlib.util.find_spec("trackio") is None:
        raise ConfigError("--trackio", problem="it needs the package trackio, which is not installed",
                          remedy="pip install trackio")
    if run.get("aio.use_gds") and run.device.kind == "cpu":
        raise run.error("aio.use_gds", expected="false on a CPU")


def writable_folders(run: ResolvedConfig) -> None:
    """Check the folders of offload, monitors and profiler. Without this check, DeepSpeed fails after the start."""
    for block in ("offload_optimizer", "offload_param"):
        key = f"{_ZERO}.{block}.nvme_path"
        if run.get(f"{_ZERO}.{block}.device") == "nvme":
            folder = Path(run.get(key)).parent  # the last part is the run's own folder
            if not folder.is_dir():
                raise run.error(key, problem=f"there is no folder {folder}", remedy="make it first")
            check_folder(folder, run.file.where(key))
    for name in ("tensorboard", "csv_monitor"):
        if run.get(f"{name}.enabled"):
            check_folder(Path(run.get(f"{name}.output_path")), run.file.where(f"{name}.output_path"))
    output_file = run.get("flops_profiler.output_file")
    if run.get("flops_profiler.enabled") and output_file:
        check_folder(Path(output_file).parent, run.file.where("flops_profiler.output_file"))
