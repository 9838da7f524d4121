"""Rules for profiles."""

from pretrain.config.profiles import parse_ranks, parse_steps
from pretrain.config.resolve import ResolvedConfig
from pretrain.errors import ConfigError


def profiled_steps(run: ResolvedConfig) -> None:
    if run.args.profile_steps is None:
        return
    steps = parse_steps(run.args.profile_steps)
    if steps.last > run.train_steps:
        raise ConfigError("--profile_steps", found=run.args.profile_steps,
                          expected=f"at most the run's {run.train_steps} steps")


def pipeline_timeline(run: ResolvedConfig) -> None:
    flag, text = "--pipeline_timeline", run.args.pipeline_timeline
    if text is None:
        return
    if parse_steps(text, flag=flag).last > run.train_steps:
        raise ConfigError(flag, found=text, expected=f"at most the run's {run.train_steps} steps")
    if run.layout.pipeline_stages == 1:
        raise ConfigError(flag, found="a run with one pipeline stage", expected='"pipeline": {"stages": N} in the JSON',
                          remedy="--profile_steps profiles the steps of any run")


def profiled_ranks(run: ResolvedConfig) -> None:
    parse_ranks(run.args.profile_ranks, run.layout.world_size)


def memory_snapshot(run: ResolvedConfig) -> None:
    if run.args.memory_snapshot and run.device.kind != "cuda":
        raise ConfigError("--memory_snapshot", found=f"a run on {run.device.kind}",
                          expected="a run on cuda: torch records the memory of CUDA's allocator only",
                          remedy="leave --memory_snapshot out")
