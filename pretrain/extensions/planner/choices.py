"""The best choices of a comparison that differ in what they trade."""

from dataclasses import dataclass

from pretrain.config.layout import Layout
from pretrain.memory.compare.compare import ComparisonRow, Workload, complexity
from pretrain.memory.footprint import with_unit

MOST_CHOICES = 10
# A choice that is at most this much faster, or smaller on the device, than a better one in all else is not shown.
_SAME_TIME, _SAME_MEMORY, _SAME_HOST_MEMORY = 0.98, 0.95, 0.75
_SIMPLER = 2  # difference of complexity() from which a layout is worth a choice that is neither faster nor smaller


@dataclass(frozen=True)
class Choice:
    """One layout, and what it trades for what, compared with the recommended layout."""

    row: ComparisonRow
    trade: str


def distinct_choices(rows: list[ComparisonRow], recommended: ComparisonRow | None, workload: Workload) -> list[Choice]:
    """Return at most ten layouts that trade different things, the recommended one first, then by step time.

    Layouts with the same techniques in other degrees are one choice, and the simplest of the fastest represents it. A
    layout that gives nothing over another choice is none. All layouts are choices if there are at most ten. If none
    fits, the choices are those that need the least memory.

    Args:
        rows: in the order of display.
    """
    if len(rows) <= MOST_CHOICES or recommended is None:
        chosen = rows if len(rows) <= MOST_CHOICES else _one_of_each(rows)
    else:
        chosen = [recommended]
        for row in _one_of_each(_simplest_first([row for row in rows if row.recommendable])):
            if techniques(row) != techniques(recommended) and not any(_gives_nothing(row, each) for each in chosen):
                chosen.append(row)
        chosen = [recommended, *sorted(chosen[1:], key=lambda row: row.step_seconds)]
    return [Choice(row, trade(row, recommended, workload)) for row in chosen[:MOST_CHOICES]]


def _simplest_first(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Sort by step time; of layouts with the same techniques and nearly the same time, the simplest comes first."""
    fastest: dict[tuple[object, ...], float] = {}
    for row in rows:
        key = techniques(row)
        fastest[key] = min(fastest.get(key, row.step_seconds), row.step_seconds)

    def order(row: ComparisonRow) -> tuple[float, int, float, int]:
        best = fastest[techniques(row)]
        near = row.step_seconds * _SAME_TIME <= best
        return (best if near else row.step_seconds, complexity(row.candidate.layout) if near else 0,
                row.step_seconds, row.estimate.device_bytes)

    return sorted(rows, key=order)


def _one_of_each(rows: list[ComparisonRow]) -> list[ComparisonRow]:
    """Return the first row of each combination of techniques."""
    return list({techniques(row): row for row in reversed(rows)}.values())[::-1]


def techniques(row: ComparisonRow) -> tuple[object, ...]:
    """Return what distinguishes choices: parallelism without its degrees, offload, recomputation, precision, length."""
    layout = row.candidate.layout
    degrees = (layout.pipeline_stages, layout.tensor_parallel_size, layout.sequence_parallel_size,
               layout.expert_parallel_size)
    recompute = layout.recomputation
    return (layout.zero_stage, *(degree > 1 for degree in degrees), layout.offload_optimizer, layout.offload_param,
            recompute.part, recompute.interval > 0, recompute.offload, layout.precision, layout.grad_accum_dtype,
            layout.seq_length, row.candidate.path)


def _gives_nothing(row: ComparisonRow, other: ComparisonRow) -> bool:
    """Return whether `other` is as fast, as small and as simple, apart from small differences."""
    same_question = all(getattr(row.candidate.layout, name) == getattr(other.candidate.layout, name)
                        for name in ("precision", "grad_accum_dtype", "seq_length"))
    return same_question and row.step_seconds > _SAME_TIME * other.step_seconds \
        and row.estimate.device_bytes > _SAME_MEMORY * other.estimate.device_bytes \
        and row.estimate.host_bytes >= _SAME_HOST_MEMORY * other.estimate.host_bytes \
        and complexity(row.candidate.layout) > complexity(other.candidate.layout) - _SIMPLER


def trade(row: ComparisonRow, recommended: ComparisonRow | None, workload: Workload) -> str:
    """Say what a layout gives, and for what, compared with the recommended one; or why it cannot be used."""
    if row.shortage or row.candidate.rejection:
        return f"too large: {row.shortage}" if row.shortage else f"rejected by train.py: {row.candidate.rejection}"
    if recommended is None or row is recommended:
        return "recommended" if recommended is not None else ""
    gives, costs = list[str](), list[str]()
    ratio = row.step_seconds / recommended.step_seconds
    if abs(ratio - 1) >= 0.005:
        (gives if ratio < 1 else costs).append(f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'} time")
    ranks = workload.cluster.gpus_per_node
    for where, own, base in (("", row.estimate.device_bytes, recommended.estimate.device_bytes),
                             (" of host memory a node", row.estimate.host_bytes * ranks,
                              recommended.estimate.host_bytes * ranks),
                             (" of NVMe a node", row.estimate.nvme_bytes * ranks,
                              recommended.estimate.nvme_bytes * ranks)):
        if abs(own - base) >= 0.01 * max(own, base, 1):
            (gives if own < base else costs).append(f"{with_unit(abs(own - base))} {'less' if own < base else 'more'}"
                                                    f"{where}")
    if complexity(row.candidate.layout) <= complexity(recommended.candidate.layout) - _SIMPLER:
        gives.append("a simpler layout")
    used, before = features(row.candidate.layout), features(recommended.candidate.layout)
    costs += [text for key, text in used.items() if key not in before]
    gives += [f"no {key}" for key in before if key not in used]
    changed = [f"{used[key]} instead of {before[key]}" for key in used if used[key] != before.get(key, used[key])]
    text = " for ".join(", ".join(each) for each in (gives, costs) if each)
    if not gives and costs:
        text = f"costs {text}"
    return "; ".join(each for each in (text, ", ".join(changed)) if each) or "no difference that is predicted"


def features(layout: Layout) -> dict[str, str]:
    """Describe what a layout uses: {technique: the technique with its degree}."""
    recompute = layout.recomputation
    found = {"ZeRO": f"ZeRO-{layout.zero_stage}"}
    for word, degree in (("pipeline", layout.pipeline_stages), ("tensor parallelism", layout.tensor_parallel_size),
                         ("sequence parallelism", layout.sequence_parallel_size),
                         ("expert parallelism", layout.expert_parallel_size)):
        if degree > 1:
            found[word] = f"{degree} pipeline stages" if word == "pipeline" else f"{degree}-way {word}"
    if layout.offload_optimizer != "none":
        what = "optimizer" if layout.offload_param == "none" else "optimizer and parameters"
        found["offload"] = f"{what} on {'NVMe' if layout.offload_optimizer == 'nvme' else 'the host'}"
    if recompute.is_on:
        part = "blocks" if recompute.interval else recompute.part
        found["recomputation"] = f"recomputation of {'the MLP' if part == 'mlp' else part}" + \
            (", inputs on the host" if recompute.offload else "")
    found["precision"] = layout.precision
    if layout.grad_accum_dtype:
        found["accumulation dtype"] = f"{layout.grad_accum_dtype} accumulation"
    found["length"] = f"sequences of {layout.seq_length:,}"
    return found
