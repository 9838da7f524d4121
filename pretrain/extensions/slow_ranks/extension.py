"""Ranks, hosts and links that are slower than the others: the events, the metrics, and what to do."""

from typing import TYPE_CHECKING

from pretrain.extension import Extension, Problem

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.plan import Plan


def _callbacks(plan: "Plan") -> "list[Callback]":
    from pretrain.extensions.slow_ranks.watch import SlowRankWatch

    return [SlowRankWatch()]


EXTENSION = Extension(
    "slow_ranks", "Names ranks, hosts and network links that are slower than the others.", callbacks=_callbacks,
    section="heat_map:HeatMap", section_files=("heat_map.js", "heat_map.css"),
    files=("rank_times.jsonl",),
    events={
        "slow_rank": ("ranks hosts stage kind ratio since steps evidence",
                      "these ranks, the ranks of a host or of a pipeline stage are slower than the others, for longer "
                      "than the spread of their times explains; `kind` is the likely cause"),
        "slow_rank_over": ("ranks hosts stage kind ratio since steps", "they are as fast as the others again")},
    problems={"slow_rank": Problem(over=("slow_rank_over", "start", "stop"), is_phase=True,
                                   describe="change:problem")},
    metrics={
        "slowest_rank": ("rank", "number of the rank with the most time of its own, in which it does not wait for "
                                 "others, relative to the ranks of its pipeline stage; mean over the steps"),
        "slowest_rank_ratio": ("ratio", "its own time relative to their median")})
