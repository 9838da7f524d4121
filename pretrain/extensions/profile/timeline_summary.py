"""Time of a pipeline step on each rank, by kind: forward, backward, transfers, bubble, reduction, optimizer.

A timeline is written as text of 80 columns, as SVG, and as JSON for trace viewers.

A receive that begins before its send waits for the other stage, and so does a send of which the receive begins late.
Only the time in which both run is a transfer; the wait belongs to the bubble. In the same way, a reduction and the
optimizer's step (it begins with the norm of all gradients) wait until all ranks that take part have begun.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

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
_LETTERS = {FORWARD: "F", BACKWARD: "B", TRANSFER: "t", LOAD: "d", BUBBLE: ".", REDUCE: "R", OPTIMIZER: "O"}
_COLUMNS = 69  # columns of a row of letters, after "stage 12  "
_MOST_ROWS = 32  # most rows of a plot; of more ranks only the first pipeline is drawn
# (light, dark)
_COLOURS = {FORWARD: ("#0b62c4", "#5fadff"), BACKWARD: ("#0b7a5c", "#45d1a6"), TRANSFER: ("#c2480c", "#ff9c62"),
            LOAD: ("#55504b", "#bdb6ae"), BUBBLE: ("#e9ecf0", "#272f3a"), REDUCE: ("#9536a3", "#dc95e6"),
            OPTIMIZER: ("#7d6500", "#e2c54a")}
_PLOT_WIDTH, _LEFT, _ROW_HEIGHT, _TOP = 1000, 90, 30, 78  # pixels


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

    kind: str  # one of KINDS
    start: float
    end: float
    name: str = ""  # name of the instruction; "" between two instructions
    index: int = 0  # index of the instruction


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


def text_of(timeline: StepTimeline) -> list[str]:
    """Return the times of each stage of the first pipeline, and a row of letters for each."""
    rows = first_pipeline(timeline)
    lines = [summary_line(timeline), f"{'ms':<9}" + "".join(f"{kind:>10}" for kind in KINDS)]
    for row in rows:
        times = "".join(f"{_milliseconds(row.seconds(kind)):>10}" for kind in KINDS)
        lines.append(f"{f'stage {row.stage}':<9}{times}")
    lines += [f"{f'stage {row.stage}':<10}{_letters(row, timeline.seconds)}" for row in rows]
    return [*lines, ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items())]


def summary_line(timeline: StepTimeline) -> str:
    """Return one line: the step, its time, and its bubble next to the bubble of 1F1B."""
    return (f"step {timeline.step}: {_milliseconds(timeline.seconds)} ms; bubble {timeline.bubble:.1%} "
            f"(1F1B, equal stages: {timeline.bubble_of_1f1b:.1%})")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 1 else f"{1e3 * seconds:.3g}"


def first_pipeline(timeline: StepTimeline) -> list[RankTimeline]:
    """Return the ranks of the first pipeline, in the order of their stages."""
    first = min(rank.pipeline for rank in timeline.ranks)
    return sorted((rank for rank in timeline.ranks if rank.pipeline == first), key=lambda rank: rank.stage)


def _letters(row: RankTimeline, seconds: float) -> str:
    """Return the kind of work that takes most of each of _COLUMNS equal times."""
    times = [dict.fromkeys(KINDS, 0.0) for _ in range(_COLUMNS)]
    width = seconds / _COLUMNS
    for segment in row.segments:
        for column in range(int(segment.start / width), min(_COLUMNS, int(segment.end / width) + 1)):
            overlap = min(segment.end, (column + 1) * width) - max(segment.start, column * width)
            times[column][segment.kind] += max(0.0, overlap)
    return "".join(_LETTERS[max(KINDS, key=lambda kind: column[kind])] if any(column.values()) else " "
                   for column in times).rstrip()


def trace_of(timelines: Sequence[StepTimeline]) -> dict[str, Any]:
    """Return the JSON: the sums of each step, and "traceEvents" (https://ui.perfetto.dev, chrome://tracing)."""
    pipelines = sorted({rank.pipeline for rank in timelines[0].ranks})
    events: list[dict[str, Any]] = []
    for rank in timelines[0].ranks:
        ids = {"ph": "M", "pid": pipelines.index(rank.pipeline), "tid": rank.stage}
        events += [{**ids, "name": "process_name", "args": {"name": f"pipeline {ids['pid']}"}},
                   {**ids, "name": "thread_name", "args": {"name": f"stage {rank.stage} (rank {rank.rank})"}}]
    offset = 0.0
    for timeline in timelines:
        for rank in timeline.ranks:
            events += [{"ph": "X", "pid": pipelines.index(rank.pipeline), "tid": rank.stage, "cat": segment.kind,
                        "name": BUBBLE if segment.kind == BUBBLE else f"{segment.name} {segment.index}",
                        "ts": 1e6 * (offset + segment.start), "dur": 1e6 * (segment.end - segment.start),
                        "args": {"step": timeline.step}} for segment in rank.segments]
        offset += timeline.seconds
    return {"displayTimeUnit": "ms", "steps": [_sums(timeline) for timeline in timelines], "traceEvents": events}


def _sums(timeline: StepTimeline) -> dict[str, Any]:
    ranks = [{"rank": rank.rank, "stage": rank.stage, "data_parallel_rank": rank.pipeline[0],
              "tensor_parallel_rank": rank.pipeline[1], **{f"{kind}_ms": 1e3 * rank.seconds(kind) for kind in KINDS}}
             for rank in timeline.ranks]
    return {"step": timeline.step, "pipeline_stages": timeline.num_stages, "micro_batches": timeline.micro_batches,
            "step_ms": 1e3 * timeline.seconds, "pipeline_ms": 1e3 * timeline.pipeline_seconds,
            "bubble": timeline.bubble, "bubble_of_1f1b": timeline.bubble_of_1f1b, "ranks": ranks}


def svg_of(timeline: StepTimeline) -> str:
    """Return the plot of a step: a row for each rank. It needs no other file, and follows the viewer's dark mode."""
    rows = sorted(timeline.ranks, key=lambda rank: (rank.pipeline, rank.stage))
    rows = rows if len(rows) <= _MOST_ROWS else first_pipeline(timeline)
    height = _TOP + _ROW_HEIGHT * len(rows) + 40
    body = [f'<text x="12" y="24" class="title">Pipeline, {escape(summary_line(timeline))}</text>', *_legend()]
    for position, row in enumerate(rows):
        body += _row(row, _TOP + _ROW_HEIGHT * position, timeline.seconds, several=len({r.pipeline for r in rows}) > 1)
    body += _axis(timeline.seconds, _TOP + _ROW_HEIGHT * len(rows))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _PLOT_WIDTH + 20} {height}" role="img" '
            f'aria-label="{escape(summary_line(timeline))}">\n<style>\n{_style()}</style>\n'
            '<rect class="page" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n")


def _style() -> str:
    light = "".join(f".{kind}{{fill:{colours[0]}}}" for kind, colours in _COLOURS.items())
    dark = "".join(f".{kind}{{fill:{colours[1]}}}" for kind, colours in _COLOURS.items())
    return ("text{font:12px system-ui,sans-serif;fill:#1b222c}.title{font-size:15px;font-weight:600}"
            ".page{fill:#ffffff}.tick{stroke:#d9dde3}.number{font-size:10px;fill:#ffffff;text-anchor:middle}\n"
            f"{light}\n@media(prefers-color-scheme:dark){{text{{fill:#e8ecf1}}.page{{fill:#1a2029}}"
            f".tick{{stroke:#323b48}}.number{{fill:#12161c}}{dark}}}\n")


def _legend() -> list[str]:
    parts, x = [], 12
    for kind in KINDS:
        parts.append(f'<rect class="{kind}" x="{x}" y="40" width="14" height="14"/><text x="{x + 19}" y="52">{kind}'
                     "</text>")
        x += 110
    return parts


def _row(row: RankTimeline, y: int, seconds: float, *, several: bool) -> list[str]:
    label = f"stage {row.stage} rank {row.rank}" if several else f"stage {row.stage}"
    parts = [f'<text x="12" y="{y + 17}">{label}</text>']
    for segment in row.segments:
        x, width = _LEFT + _PLOT_WIDTH * segment.start / seconds, _PLOT_WIDTH * (segment.end - segment.start) / seconds
        name = f"{segment.name} {segment.index}".strip() if segment.name else "between instructions"
        parts.append(f'<rect class="{segment.kind}" x="{x:.2f}" y="{y}" width="{max(width, 0.2):.2f}" height="24">'
                     f"<title>{segment.kind}: {name}, {1e3 * (segment.end - segment.start):.3f} ms</title></rect>")
        if segment.kind in (FORWARD, BACKWARD) and width > 16:
            parts.append(f'<text class="number" x="{x + width / 2:.2f}" y="{y + 16}">{segment.index}</text>')
    return parts


def _axis(seconds: float, y: int) -> list[str]:
    parts = []
    for part in range(6):
        x = _LEFT + _PLOT_WIDTH * part / 5
        parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{y + 4}"/>'
                     f'<text x="{x}" y="{y + 20}" text-anchor="{"end" if part == 5 else "middle"}">'
                     f"{_milliseconds(seconds * part / 5)}{' ms' if part == 5 else ''}</text>")
    return parts
