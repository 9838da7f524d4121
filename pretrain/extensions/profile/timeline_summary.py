"""Time of a pipeline step on each rank: forward, backward, transfers, bubble, reduction, optimizer.

A receive that begins before its send waits for the other stage, and so does a send of which the receive begins late.
Only the time in which both run is a transfer; the wait belongs to the bubble. In the same way, a reduction and the
optimizer's step (it begins with the norm of all gradients) wait until all ranks that take part have begun.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORWARD, BACKWARD, TRANSFER, LOAD = "forward", "backward", "transfers", "data"
REDUCE, OPTIMIZER, BUBBLE = "reduce", "optimizer", "bubble"
KINDS = (FORWARD, BACKWARD, TRANSFER, LOAD, BUBBLE, REDUCE, OPTIMIZER)
_KIND_OF = {"ForwardPass": FORWARD, "BackwardPass": BACKWARD, "SendActivation": TRANSFER, "RecvActivation": TRANSFER,
            "SendGrad": TRANSFER, "RecvGrad": TRANSFER, "LoadMicroBatch": LOAD, "ReduceGrads": REDUCE,
            "ReduceTiedGrads": REDUCE, "OptimizerStep": OPTIMIZER}
# instruction -> (the instruction of the other stage, its distance in stages)
_PARTNERS = {"SendActivation": ("RecvActivation", 1), "RecvActivation": ("SendActivation", -1),
             "SendGrad": ("RecvGrad", -1), "RecvGrad": ("SendGrad", 1)}
_AT_THE_END = (REDUCE, OPTIMIZER)


@dataclass(frozen=True)
class Instruction:
    """One executed instruction. Times are seconds of rank 0's clock."""

    step: int
    name: str  # class name in deepspeed/runtime/pipe/schedule.py, such as "ForwardPass"
    index: int  # how many instructions of this name came before it in the step: the micro-batch, for most
    start: float
    end: float


@dataclass(frozen=True)
class RankInstructions:
    """The instructions that one rank executed."""

    rank: int
    stage: int
    pipeline: tuple[int, int]  # data-parallel and tensor-parallel rank: ranks with the same values are one pipeline
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Segment:
    """A time in which a rank did one kind of work, in seconds from the start of the step."""

    kind: str  # of KINDS
    start: float
    end: float
    name: str = ""  # of the instruction; "" between two instructions
    index: int = 0  # of the instruction


@dataclass(frozen=True)
class RankTimeline:
    """The segments of a rank in one step: without gaps, from the step's start to the rank's last instruction."""

    rank: int
    stage: int
    pipeline: tuple[int, int]
    segments: tuple[Segment, ...]

    def seconds(self, kind: str, *, until: float = float("inf")) -> float:
        """Return the time of one kind of work before `until`."""
        return sum(max(0.0, min(segment.end, until) - segment.start) for segment in self.segments
                   if segment.kind == kind)


@dataclass(frozen=True)
class StepTimeline:
    """All ranks in one step."""

    step: int
    num_stages: int
    micro_batches: int
    ranks: tuple[RankTimeline, ...]
    pipeline_seconds: float  # from the start of the step to the end of the last backward pass and its transfer

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return max(rank.segments[-1].end for rank in self.ranks)

    def bubble_of(self, stage: int) -> float:
        """Return the bubble of a pipeline stage as a fraction of `pipeline_seconds`, mean over its ranks."""
        own = [rank.seconds(BUBBLE, until=self.pipeline_seconds) for rank in self.ranks if rank.stage == stage]
        return sum(own) / len(own) / self.pipeline_seconds

    @property
    def bubble(self) -> float:
        """The measured bubble as a fraction of `pipeline_seconds`, mean over the stages."""
        return sum(map(self.bubble_of, range(self.num_stages))) / self.num_stages

    @property
    def bubble_of_1f1b(self) -> float:
        """The bubble of 1F1B with equal stages and without transfers."""
        return (self.num_stages - 1) / (self.micro_batches + self.num_stages - 1)


def step_timelines(ranks: Sequence[RankInstructions]) -> list[StepTimeline]:
    """Return the timelines of all recorded steps."""
    steps = sorted({each.step for each in ranks[0].instructions})
    return [_step_timeline(step, ranks) for step in steps]


def _step_timeline(step: int, ranks: Sequence[RankInstructions]) -> StepTimeline:
    own = {rank.rank: [each for each in rank.instructions if each.step == step] for rank in ranks}
    origin = min(each.start for instructions in own.values() for each in instructions)
    num_stages = 1 + max(rank.stage for rank in ranks)
    starts = {(rank.pipeline, rank.stage, each.name, each.index): each.start
              for rank in ranks for each in own[rank.rank]}
    timelines, pipeline_end = [], origin
    for rank in ranks:
        segments: list[Segment] = []
        end = origin
        for each in own[rank.rank]:
            kind = _KIND_OF.get(each.name, BUBBLE)
            ready = min(max(_ready(each, rank, starts), each.start), each.end)
            for part, start, stop in ((BUBBLE, end, each.start), (BUBBLE, each.start, ready), (kind, ready, each.end)):
                if stop > start:
                    name = each.name if start >= each.start else ""
                    segments.append(Segment(part, start - origin, stop - origin, name, each.index))
            end = max(end, each.end)
            if kind not in _AT_THE_END:
                pipeline_end = max(pipeline_end, each.end)
        timelines.append(RankTimeline(rank.rank, rank.stage, rank.pipeline, tuple(segments)))
    micro_batches = sum(each.name == "BackwardPass" for each in own[ranks[0].rank])
    return StepTimeline(step, num_stages, micro_batches, tuple(timelines), pipeline_end - origin)


def _ready(each: Instruction, rank: RankInstructions,
           starts: dict[tuple[tuple[int, int], int, str, int], float]) -> float:
    """Return the time at which the last rank that takes part in an instruction has begun it."""
    if each.name in _PARTNERS:
        name, distance = _PARTNERS[each.name]
        partner = starts.get((rank.pipeline, rank.stage + distance, name, each.index), each.start)
        ends_before = partner > each.end  # a send may: the network has buffered it
        return each.start if ends_before and each.name.startswith("Send") else partner
    if each.name == "ReduceTiedGrads":
        return max(_starts_of(each, starts, pipeline=rank.pipeline))
    if each.name == "ReduceGrads":
        return max(_starts_of(each, starts, stage=rank.stage))
    return max(_starts_of(each, starts)) if each.name == "OptimizerStep" else each.start


def _starts_of(each: Instruction, starts: dict[tuple[tuple[int, int], int, str, int], float], *,
               pipeline: tuple[int, int] | None = None, stage: int | None = None) -> Iterable[float]:
    """Return the starts of the same instruction on all ranks, or on the ranks of a pipeline or stage."""
    return [start for (of_pipeline, of_stage, name, index), start in starts.items()
            if name == each.name and index == each.index and pipeline in (None, of_pipeline)
            and stage in (None, of_stage)]
