"""The lines of a verdict, in 80 columns: the verdict, the evidence, and what to do."""

import textwrap
from collections.abc import Sequence

from pretrain.analysis.replay.causes import CAUSES
from pretrain.analysis.replay.target import Target
from pretrain.analysis.replay.verdict import SURE, Verdict
from pretrain.errors import listed, named, printable

_COLUMNS = 80


def verdict_lines(target: Target, verdict: Verdict, notes: Sequence[str]) -> list[str]:
    """Return the lines about a verdict."""
    lines = _wrapped(f"{target.run}@{target.step}: {_headline(verdict)}", "", "  ")
    if verdict.certainty != SURE:
        for reason in verdict.reasons:
            lines += _wrapped(reason, "unsure:   ")
        if verdict.also:
            others = [CAUSES[kind].text for kind in verdict.also[:4]]
            lines += _wrapped(f"it may also be that {'; or that '.join(others)}"
                              if len(verdict.also) <= 4 else "nothing is known about the cause", "          ")
    for text in verdict.evidence:
        lines += _wrapped(text, "evidence: ")
    lines += _wrapped(verdict.remedy, "remedy:   ")
    for note in notes:
        lines += _wrapped(note, "note:     ")
    return lines


def _headline(verdict: Verdict) -> str:
    where = [f"from step {verdict.step} on"] if verdict.step is not None else []
    if verdict.ranks:
        where.append(named("rank", verdict.ranks) + (f" on {listed(verdict.hosts)}" if verdict.hosts else ""))
    if verdict.pipeline_stage is not None:
        where.append(f"pipeline stage {verdict.pipeline_stage}")
    if verdict.operator is not None:
        where.append(f"operator {verdict.operator}")
    elif verdict.layer is not None:
        where.append(f"layer {verdict.layer}")
    again = ", and it happens again in the replays" if verdict.now and verdict.kind != "nondeterministic" else ""
    begin = "" if verdict.certainty == SURE else "probably, "
    return begin + verdict.text + (f" ({'; '.join(where)})" if where else "") + again


def _wrapped(text: str, begin: str, indent: str | None = None) -> list[str]:
    return textwrap.wrap(printable(text), _COLUMNS - 1, initial_indent=begin, break_on_hyphens=False,
                         subsequent_indent=" " * len(begin) if indent is None else indent)
