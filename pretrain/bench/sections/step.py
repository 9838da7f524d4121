"""--what step: tokens a second, MFU and memory of this project and of what people would use instead."""

import statistics
from typing import Any

from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import Say, Section, Turns, spread, take_turns
from pretrain.model.flops import flops_per_token

PROJECT, PRODUCTS = "this project", "matrix products"
PEERS = {"transformers.Trainer": "trainer", "DeepSpeed, bare loop": "deepspeed", "plain PyTorch": "torch"}
# of the first loss: the same weights and samples in another order of rounding
_SAME_LOSS = {"bf16": 1e-3, "fp32": 1e-5}


def compare(workshop: Workshop, say: Say) -> Section:
    """All contenders, the matrix products among them, in turns."""
    preset = workshop.settings.preset
    sides = [[workshop.job(PRODUCTS, "products", product_size=preset.product_size)],
             [workshop.job(PROJECT, "project")], *([workshop.job(name, kind)] for name, kind in PEERS.items())]
    turns = take_turns(sides, workshop, say)
    tflops = max((answer["tflops"] for answer in turns.answers.get(PRODUCTS, [])), default=None)
    figures = {name: _figures(name, workshop, turns, tflops) for name in (PROJECT, *PEERS) if name in turns.answers}
    ours = figures.get(PROJECT)
    for values in figures.values():
        values["speed_ratio"] = ours and ours["tokens_per_second"] / values["tokens_per_second"]
        values["memory_ratio"] = ours and ours["peak_memory_bytes"] / values["peak_memory_bytes"]
    differing = _other_work(figures, workshop.settings.precision)
    return Section(
        what="step", title="Training step",
        columns=["", "tokens/s", "rounds differ by", "TFLOP/s", "MFU", "peak memory", "tokens/s, ours : its",
                 "memory, ours : its", "first loss"],
        rows=[_row(name, values) for name, values in figures.items()], notes=_notes(workshop, tflops),
        failures=[*turns.failures, *differing],
        data={"contenders": figures, "matmul_tflops": tflops, "same_work": not differing,
              "flops_per_token": flops_per_token(workshop.model, preset.seq_length)})


def tokens_per_second(workshop: Workshop, seconds: list[float], steps: int, *, samples: int) -> list[float]:
    """Of each round; `samples` are those of a step."""
    return [steps * samples * workshop.settings.preset.seq_length / value for value in seconds]


def _figures(name: str, workshop: Workshop, turns: Turns, tflops: float | None) -> dict[str, Any]:
    preset = workshop.settings.preset
    rates = tokens_per_second(workshop, turns.seconds(name), preset.steps, samples=preset.micro_batch_size)
    rate, answers = statistics.median(rates), turns.answers[name]
    flops = flops_per_token(workshop.model, preset.seq_length)
    return {
        "tokens_per_second": rate, "rounds": rates, "parameters": turns.facts[name]["parameters"],
        "mfu": tflops and rate * flops / tflops / 1e12,
        **{kind: max(answer[kind] for answer in answers) for kind in
           ("peak_memory_bytes", "resident_bytes", "reserved_bytes") if kind in answers[0]},
        "tflops": rate * flops / 1e12, "losses": turns.losses(name),
    }


def _other_work(figures: dict[str, dict[str, Any]], precision: str) -> list[str]:
    """Who does not do this project's work: another number of parameters, or another loss before the first update."""
    ours, lines = figures.get(PROJECT), []
    for name, values in figures.items() if ours else ():
        assert ours is not None
        difference = abs(values["losses"][0] / ours["losses"][0] - 1)
        if not difference <= _SAME_LOSS[precision]:
            lines.append(f"{name}: first loss {values['losses'][0]:.6f}, this project's {ours['losses'][0]:.6f}: "
                         "not the same work")
        if values["parameters"] != ours["parameters"]:
            lines.append(f"{name}: {values['parameters']:,} parameters, this project {ours['parameters']:,}")
    return lines


def _row(name: str, values: dict[str, Any]) -> list[str]:
    def ratio(key: str, digits: int = 2) -> str:
        return "" if values[key] is None else f"{values[key]:.{digits}f}"

    return [name, f"{values['tokens_per_second']:,.0f}", f"{spread(values['rounds']):.1%}", f"{values['tflops']:.3g}",
            ratio("mfu", 3), f"{values['peak_memory_bytes'] / 1e9:.2f} GB", ratio("speed_ratio"),
            ratio("memory_ratio"), f"{values['losses'][0]:.4f}"]


def _notes(workshop: Workshop, tflops: float | None) -> list[str]:
    settings = workshop.settings
    memory = "resident memory above what was there before the model" if settings.device.kind == "cpu" else \
        "the allocator's peak"
    notes = [f"tokens/s: median of {settings.rounds} rounds of {settings.preset.steps} steps; peak memory: {memory}."]
    if tflops is not None:
        notes.append(f"MFU: of {tflops:.3g} TFLOP/s, the best {settings.precision} product of matrices of "
                     f"{settings.preset.product_size:,} rows, measured in the same rounds.")
    if not settings.preset.side_by_side:
        notes.append("The contenders followed one another: they do not fit on one device together.")
    return notes
