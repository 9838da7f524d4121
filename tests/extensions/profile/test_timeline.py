"""Pipeline timelines of DeepSpeed's schedule, simulated with known times of the instructions."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from deepspeed.runtime.pipe import schedule

from pretrain.extensions.profile.timeline import write_timelines
from pretrain.extensions.profile.timeline_summary import (
    BACKWARD,
    BUBBLE,
    FORWARD,
    KINDS,
    OPTIMIZER,
    TRANSFER,
    Instruction,
    RankInstructions,
    step_timelines,
    text_of,
)

_SENDS = {"RecvActivation": ("SendActivation", -1), "RecvGrad": ("SendGrad", 1)}


def simulate(stages: int, micro_batches: int, seconds: Callable[[int, str], float]) -> list[RankInstructions]:
    """Run DeepSpeed's 1F1B schedule with instructions that take `seconds(stage, name)`.

    A receive ends `seconds` after both sides have begun; a send ends with its receive. All ranks end the optimizer's
    step together.
    """
    commands = [[command for step in schedule.TrainSchedule(micro_batches, stages, stage) for command in step]
                for stage in range(stages)]
    begun: dict[tuple[int, str, int], float] = {}
    done: list[list[Instruction]] = [[] for _ in range(stages)]
    clocks = [0.0] * stages
    while any(len(done[stage]) < len(commands[stage]) for stage in range(stages)):
        for stage in range(stages):
            while len(done[stage]) < len(commands[stage]):
                name = type(commands[stage][len(done[stage])]).__name__
                index = sum(each.name == name for each in done[stage])
                start = begun.setdefault((stage, name, index), clocks[stage])
                ready, transfer = start, 0.0
                if name in _SENDS:
                    other = begun.get((stage + _SENDS[name][1], _SENDS[name][0], index))
                elif name.startswith("Send"):
                    receive, distance = ("RecvActivation", 1) if name == "SendActivation" else ("RecvGrad", -1)
                    other, transfer = begun.get((stage + distance, receive, index)), seconds(stage + distance, receive)
                elif name == "OptimizerStep":
                    starts = [begun.get((rank, name, 0)) for rank in range(stages)]
                    other = None if None in starts else max(start for start in starts if start is not None)
                else:
                    other = start
                if other is None:
                    break
                ready = max(start, other)
                clocks[stage] = ready + transfer + (0.0 if name.startswith("Send") else seconds(stage, name))
                done[stage].append(Instruction(7, name, index, 100 + start, 100 + clocks[stage]))
    return [RankInstructions(stage, stage, (0, 0), tuple(done[stage])) for stage in range(stages)]


def equal_stages(stage: int, name: str) -> float:
    return {"ForwardPass": 1.0, "BackwardPass": 2.0, "OptimizerStep": 0.5}.get(name, 0.0)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 8), (3, 5), (4, 4), (4, 16)])
def test_equal_stages_have_the_bubble_of_1f1b(stages: int, micro_batches: int) -> None:
    timeline, = step_timelines(simulate(stages, micro_batches, equal_stages))
    assert (timeline.step, timeline.num_stages, timeline.micro_batches) == (7, stages, micro_batches)
    assert timeline.pipeline_seconds == pytest.approx(3 * (micro_batches + stages - 1))
    for stage in range(stages):
        assert timeline.bubble_of(stage) == pytest.approx(timeline.bubble_of_1f1b)
    assert timeline.bubble_of_1f1b == (stages - 1) / (micro_batches + stages - 1)
    assert timeline.seconds == pytest.approx(timeline.pipeline_seconds + 0.5)
    for rank in timeline.ranks:
        assert (rank.seconds(FORWARD), rank.seconds(BACKWARD)) == pytest.approx((micro_batches, 2 * micro_batches))
        assert rank.seconds(OPTIMIZER) == pytest.approx(0.5)  # without the wait for the other stages


def test_waiting_for_a_slow_stage_is_bubble_and_not_transfer() -> None:
    """The second stage takes twice as long: the first one waits for it, mostly inside of its receives."""
    def seconds(stage: int, name: str) -> float:
        transfers = {"RecvActivation": 0.125, "RecvGrad": 0.125}
        return transfers.get(name, equal_stages(stage, name) * (2 if stage == 1 else 1))

    timeline, = step_timelines(simulate(2, 8, seconds))
    first, second = timeline.ranks
    assert timeline.bubble_of(0) > 0.4 > 0.1 > timeline.bubble_of(1)
    for rank in (first, second):
        assert rank.seconds(TRANSFER) == pytest.approx(2 * 8 * 0.125)
        starts = [segment.start for segment in rank.segments[1:]]
        assert starts == pytest.approx([segment.end for segment in rank.segments[:-1]])  # no gaps, no overlaps
        assert sum(map(rank.seconds, KINDS)) == pytest.approx(rank.segments[-1].end)


def test_a_send_that_ends_before_its_receive_begins_does_not_wait() -> None:
    """Small messages are copied into a buffer of the network."""
    ranks = [RankInstructions(0, 0, (0, 0), (Instruction(1, "ForwardPass", 0, 0.0, 1.0),
                                             Instruction(1, "SendActivation", 0, 1.0, 1.5),
                                             Instruction(1, "BackwardPass", 0, 5.0, 6.0))),
             RankInstructions(1, 1, (0, 0), (Instruction(1, "RecvActivation", 0, 2.0, 2.25),
                                             Instruction(1, "ForwardPass", 0, 2.25, 4.0),
                                             Instruction(1, "BackwardPass", 0, 4.0, 5.0)))]
    timeline, = step_timelines(ranks)
    first, second = timeline.ranks
    assert (first.seconds(TRANSFER), first.seconds(BUBBLE)) == (0.5, 3.5)
    assert (second.seconds(TRANSFER), second.seconds(BUBBLE)) == (0.25, 2.0)


def test_text_shows_the_schedule_in_80_columns() -> None:
    lines = text_of(step_timelines(simulate(4, 8, equal_stages))[0])
    assert max(map(len, lines)) <= 80
    assert lines[0] == "step 7: 33,500 ms; bubble 27.3% (1F1B, equal stages: 27.3%)"
    rows = [line.removeprefix(f"stage {stage}").strip() for stage, line in enumerate(lines[6:10])]
    first, last = rows[0], rows[3]
    assert first.startswith("FFFF")
    assert last.startswith("...")
    assert last[last.index("F"):].startswith("FFBBBB")  # 1F1B: the last stage alternates
    assert first.count("B") > 1.5 * first.count("F") > 0


def test_files(tmp_path: Path) -> None:
    timeline, = step_timelines(simulate(3, 64, equal_stages))
    write_timelines(tmp_path, [timeline])
    values = json.loads((tmp_path / "timeline.json").read_text())
    events = [event for event in values["traceEvents"] if event["ph"] == "X"]
    assert {(event["tid"], event["cat"]) for event in events} >= {(stage, FORWARD) for stage in range(3)}
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(1e6 * timeline.seconds)
    sums = values["steps"][0]
    assert sums["bubble"] == pytest.approx(2 / 66)
    assert sums["ranks"][1]["backward_ms"] == pytest.approx(128e3)
    plot = ElementTree.parse(tmp_path / "step7.svg").getroot()  # well-formed
    rectangles = [each for each in plot.iter() if each.tag.endswith("rect") and each.get("class") == FORWARD]
    assert len(rectangles) == 3 * 64 + 1  # and one in the legend
    assert "http" not in (tmp_path / "step7.svg").read_text().replace("http://www.w3.org/2000/svg", "")
