"""Pipeline timelines as text of 80 columns, as SVG, and as JSON for trace viewers."""

from collections.abc import Sequence
from html import escape
from typing import Any

from pretrain.extensions.profile.timeline_summary import (
    BACKWARD,
    BUBBLE,
    FORWARD,
    KINDS,
    LOAD,
    OPTIMIZER,
    REDUCE,
    TRANSFER,
    RankTimeline,
    StepTimeline,
)

_LETTERS = {FORWARD: "F", BACKWARD: "B", TRANSFER: "t", LOAD: "d", BUBBLE: ".", REDUCE: "R", OPTIMIZER: "O"}
_COLUMNS = 69  # of a row of letters, after "stage 12  "
_MOST_ROWS = 32  # of a plot; of more ranks only the first pipeline is drawn
# (light, dark)
_COLOURS = {FORWARD: ("#0b62c4", "#5fadff"), BACKWARD: ("#0b7a5c", "#45d1a6"), TRANSFER: ("#c2480c", "#ff9c62"),
            LOAD: ("#55504b", "#bdb6ae"), BUBBLE: ("#e9ecf0", "#272f3a"), REDUCE: ("#9536a3", "#dc95e6"),
            OPTIMIZER: ("#7d6500", "#e2c54a")}
_PLOT_WIDTH, _LEFT, _ROW_HEIGHT, _TOP = 1000, 90, 30, 78  # pixels


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
