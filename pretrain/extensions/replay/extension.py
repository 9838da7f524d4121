"""The flight record, recomputation, and replays of a step: flags, subcommand, rules, and the order for the ranks."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.cli import path_text
from pretrain.config.flags.flag import Flag, Group
from pretrain.errors import ConfigError, reason_of
from pretrain.extension import Command, Extension, Problem, RequestFile
from pretrain.stored_json import build, read_json

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.plan import Plan

SAMPLES_FILE = "samples.json"  # in the run folder of the replay: SampleReport
RECORD_FILE = "RECORD"  # in the run folder: the run keeps a copy of the flight record
GROUP = Group("when something goes wrong")
_CAUSE = "`ds-pretrain replay {run}@{step}` finds the cause"
_SAMPLES = "`ds-pretrain replay {run}@{step}` names the samples, and what skipping them gives"


@dataclass(frozen=True)
class ReplayOrder:
    """Steps that a replay trains. It ends after `step`, and neither evaluates nor saves."""

    step: int
    consumed_samples: int | None = None  # data position of its first step; None: that of the checkpoint
    vetoed: list[int] = field(default_factory=list)  # steps whose update the run skipped because of a spike
    cross_check: bool = False  # a micro-batch of each data-parallel rank is computed on the next one, too
    # examine the samples of `step`, and train it and so many steps after it with and without the odd ones; None: no
    steps_after: int | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_order(path: Path) -> ReplayOrder:
    """Read the file. Raises ConfigError."""
    try:
        return build(ReplayOrder, read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--replay {path}", problem=f"it cannot be read ({reason_of(error)})",
                          remedy="`ds-pretrain replay` writes this file, and gives this flag itself") from None


@dataclass(frozen=True)
class Replay:
    """Records of the steps of a run for replays, and micro-batches that it computes twice."""

    flight_steps: int = GROUP.flag(
        512, "keep a small record of at least the last N steps of each rank in RUN/flight, from which a step can be "
        "questioned; 0: off", low=0, high=1_000_000, repeats=True)
    flight_interval: int | None = GROUP.flag(
        None, "steps between two steps whose record also has checksums of weights, states and gradients, and of each "
        "layer", low=1, unset="chosen at the start, so that the record costs at most 0.2% of the time", repeats=True)
    recompute_interval: int = GROUP.flag(
        0, "steps between two comparisons of what devices compute: a micro-batch of each data-parallel rank is "
        "computed again on the next one, and compared bit by bit; also before each save; 0: never", low=0,
        repeats=True)
    replay: str | None = dataclasses.field(  # written by `ds-pretrain replay`: see ReplayOrder
        default=None, metadata={"flag": Flag(GROUP, argparse.SUPPRESS, parse=path_text)})


def _check(args: "RunArguments") -> None:
    flags = args.of(Replay)
    if flags.flight_interval is not None and not flags.flight_steps:
        raise ConfigError("--flight_interval", problem="it has no effect with --flight_steps 0",
                          remedy="remove one of the two flags")


def _notes(plan: "Plan") -> Iterator[str]:
    if plan.args.of(Replay).recompute_interval and plan.layout.data_parallel_size == 1:
        yield ("--recompute_interval: without a second data-parallel rank, each micro-batch is computed again on the "
               "same device, which finds results that vary, and none that are wrong each time")


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    """Yield the parts of a run. Their modules import torch: each is imported if the run has it."""
    flags = plan.args.of(Replay)
    if flags.recompute_interval:
        from pretrain.extensions.replay.recompute import Recomputation
        yield Recomputation(flags.recompute_interval)
    if flags.flight_steps:
        from pretrain.extensions.replay.recorder import FlightRecorder
        yield FlightRecorder(steps=flags.flight_steps, interval=flags.flight_interval)
    if flags.replay is not None:
        from pretrain.extensions.replay.samples import ReplayedSteps
        yield ReplayedSteps(read_order(Path(flags.replay)))


EXTENSION = Extension(
    "replay", "Keeps a flight record, computes micro-batches twice, and says why a step was as it was.",
    settings=Replay, is_always_used=True, check=_check, notes=_notes, callbacks=_callbacks,
    results="section:results", section="section:Replays", section_files=("section.js",),
    requests={RECORD_FILE: RequestFile(answer="keeping the flight record")},
    commands={"replay": Command("during and after a run", "train a step again, and say why it was as it was", ".main")},
    events={"recomputation": ("finding ranks hosts layer direction value",
                              "`--recompute_interval` found different results for a micro-batch: `finding` is `flaky`, "
                              "`wrong`, `undecided`, or `off` if no comparison is possible here")},
    problems={"recomputation": Problem("{reason}", "do not trust the machine", unless=("finding", "off"),
                                       over=("start",))},
    advice={**dict.fromkeys(("corruption", "recomputation"), _CAUSE),
            **dict.fromkeys(("spike", "skip", "not_finite", "rollback", "guard"), _SAMPLES)},
    reference={"flight": ("Keys of the flight record", "compare:reference")})
