"""Profiles of steps by torch.profiler, and timelines of pipelines: flags and their values, requests of running jobs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.config.flags.flag import Group
from pretrain.errors import ConfigError
from pretrain.extension import Extension, RequestFile

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.layout_rules import Rule
    from pretrain.config.plan import Plan

REQUEST = "PROFILE"  # file in the run folder: the number of steps to profile, or empty
DEFAULT_PROFILE_STEPS = 3  # steps of a profile of a running job
MOST_STEPS = 100  # a trace of a large model has some MB per step
GROUP = Group("checks, measurements and profiles")


@dataclass(frozen=True)
class Profile:
    """Steps that are profiled, and the ranks that write a profile."""

    profile_steps: str | None = GROUP.flag(
        None, "steps to profile, the first and the last one, such as 10:12: each rank writes a trace and a table of "
        "operators to RUN/profiles; to profile a running job, `touch RUN/PROFILE`", metavar="FIRST:LAST", repeats=True,
        elsewhere="profile profile_step_start profile_step_end profile_step_stop use_pytorch_profiler "
        "profiler.enable_profiling profiler.profile_freq")
    profile_ranks: str = GROUP.flag("all", "ranks that write a profile, such as 0,8", metavar="all|RANK,...",
                                    repeats=True)
    pipeline_timeline: str | None = GROUP.flag(
        None, "steps of a run with several pipeline stages, such as 10:12, whose time is divided into forward, "
        "backward, transfers and bubble: writes plots and a JSON to RUN/profiles", metavar="FIRST:LAST", repeats=True)
    memory_snapshot: bool = GROUP.flag(
        False, "the profiled steps also write each allocation of GPU memory with its stack", repeats=True,
        elsewhere="record_memory_history memory_snapshot_path memory_profiling memory_profiling_path "
        "profiler.enable_memory_snapshot profiler.memory_snapshot_freq")


@dataclass(frozen=True)
class ProfileSteps:
    """Steps of one profile; both numbers are included."""

    first: int
    last: int


def parse_steps(text: str, *, flag: str = "--profile_steps") -> ProfileSteps:
    """Parse `FIRST:LAST`, or the number of a single step. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", text)
    if match is None:
        raise ConfigError(flag, found=text, expected="the first and the last step, such as 10:12")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ConfigError(flag, found=text, expected="a first step from 1, and a last step not before it")
    if last - first >= MOST_STEPS:
        raise ConfigError(flag, found=f"{last - first + 1} steps", expected=f"at most {MOST_STEPS}",
                          remedy="a trace of more steps is too large for the viewers")
    return ProfileSteps(first, last)


def parse_ranks(text: str, world_size: int) -> frozenset[int]:
    """Parse `all`, or numbers of ranks with commas between them. Raises ConfigError."""
    if text == "all":
        return frozenset(range(world_size))
    if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text):
        raise ConfigError("--profile_ranks", found=text, expected="all, or numbers of ranks such as 0,8")
    ranks = frozenset(int(word) for word in text.split(","))
    if max(ranks) >= world_size:
        raise ConfigError("--profile_ranks", found=max(ranks), expected=f"a rank from 0 to {world_size - 1}")
    return ranks


def _requested_steps(text: str) -> int:
    """Return the number of steps that the file asks for."""
    word = text[:20].strip()
    return min(max(int(word), 1), MOST_STEPS) if word.isdecimal() else DEFAULT_PROFILE_STEPS


def _rules(plan: "Plan") -> "Iterator[Rule]":
    """Yield rules for steps, stages, ranks and devices that the run does not have."""
    from pretrain.config.layout_rules import Rule

    args, stages = plan.args.of(Profile), plan.layout.pipeline_stages
    for flag, text in (("--profile_steps", args.profile_steps), ("--pipeline_timeline", args.pipeline_timeline)):
        yield Rule(text is not None and parse_steps(text, flag=flag).last > plan.train_steps, flag,
                   f"at most the run's {plan.train_steps} steps")
    yield Rule(args.pipeline_timeline is not None and stages == 1, "--pipeline_timeline",
               '"pipeline": {"stages": N} in the JSON', "--profile_steps profiles the steps of any run",
               found="a run with one pipeline stage")
    parse_ranks(args.profile_ranks, plan.layout.world_size)
    yield Rule(args.memory_snapshot and plan.device.kind != "cuda", "--memory_snapshot",
               "a run on cuda: torch records the memory of CUDA's allocator only", "leave --memory_snapshot out",
               found=f"a run on {plan.device.kind}")


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    from pretrain.extensions.profile.profiler import Profiler

    flags = plan.args.of(Profile)
    yield Profiler(flags)
    if flags.pipeline_timeline:
        from pretrain.extensions.profile.timeline import PipelineTimeline
        yield PipelineTimeline(flags.pipeline_timeline)


EXTENSION = Extension(
    "profile", "Profiles steps, planned or of a running job, and divides the time of a pipeline's steps.",
    settings=Profile, is_always_used=True, rules=_rules, callbacks=_callbacks,
    requests={REQUEST: RequestFile(_requested_steps, by_signal=True)},
    events={"profile": ("first_step path", "a profile was written"),
            "pipeline_timeline": ("first_step path bubble", "`--pipeline_timeline` was written")})
