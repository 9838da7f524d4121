"""Published tables that need no GPU: this project's formulas give the numbers of the rows, and no run is trained.

The rows are data in recipe.yaml. A `Table` has numbers; `Activations` has formulas for the bytes that a block keeps.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pretrain.commands.small_runs import Curve
from pretrain.config.layout import Layout
from pretrain.errors import format_number
from pretrain.memory.estimate.estimate_memory import estimate_memory
from pretrain.memory.footprint import GB
from pretrain.model.config import model_config_from
from pretrain.model.description import ModelConfig
from pretrain.model.flops import flops_per_token
from pretrain.model.layer_memory import block_saved
from pretrain.model.operator_memory import MicroBatch, hidden_states_bytes

_NUMBER = re.compile(r"\d+(\.\d+)?")
BILLION = 1e9
PUBLISHED = "published"  # last column of a table
_ROUNDING = 1e-9  # error of numbers that are compared as printed


@dataclass(frozen=True)
class Result:
    """Outcome of an expectation: whether it is met, in a line of text."""

    is_met: bool
    text: str


def sweep_of(name: str) -> str:
    """Return the sweep that a run belongs to: its name without the number at the end, such as w64 of w64-0.001."""
    sweep, _, number = name.rpartition("-")
    return sweep if sweep and _NUMBER.fullmatch(number) else name


def runs_of(sweep: str, curves: Mapping[str, Curve]) -> dict[float, Curve]:
    """Return the runs SWEEP-NUMBER of a sweep by their numbers, in ascending order."""
    names = [name for name in curves if sweep_of(name) == sweep != name]
    return dict(sorted((float(name.rpartition("-")[2]), curves[name]) for name in names))


def gpt(layers: int, hidden_size: int, heads: int, vocab_size: int = 51200, seq_length: int = 2048) -> ModelConfig:
    """Return a GPT of the papers: GPT-2's architecture, with dropout."""
    return model_config_from({"model_type": "gpt2", "n_layer": layers, "n_embd": hidden_size, "n_head": heads,
                              "vocab_size": vocab_size, "n_positions": seq_length}, "recipe.yaml")


def parameters(layers: int, hidden_size: int, heads: int, vocab_size: int, seq_length: int) -> float:
    """Billions of parameters."""
    return gpt(layers, hidden_size, heads, vocab_size, seq_length).num_parameters() / BILLION


def states(billions: float, ranks: int, zero_stage: int) -> float:
    """GB of parameters, gradients and optimizer states on a rank, by the ZeRO paper's formula."""
    layout = Layout(world_size=ranks, zero_stage=zero_stage)
    return estimate_memory(None, layout, num_parameters=billions * BILLION).device_bytes / GB


def engine_states(layers: int, hidden_size: int, heads: int, vocab_size: int, seq_length: int, ranks: int,
                  zero_stage: int) -> float:
    """GB of the same states that DeepSpeed's engine holds for a model, on the rank with the most."""
    layout = Layout(world_size=ranks, zero_stage=zero_stage)
    model = gpt(layers, hidden_size, heads, vocab_size, seq_length)
    return estimate_memory(model, layout).steady.states("device") / GB


def largest_model(memory_gb: float, model_parallel: int, ranks: int, zero_stage: int) -> float:
    """Billions of parameters whose states fill the memory of a device."""
    layout = Layout(world_size=ranks, zero_stage=zero_stage, tensor_parallel_size=model_parallel)
    bytes_of_a_trillion = estimate_memory(None, layout, num_parameters=1000 * BILLION).device_bytes
    return 1000 * memory_gb * GB / bytes_of_a_trillion


def mfu(layers: int, hidden_size: int, heads: int, vocab_size: int, seq_length: int, gpus: int, batch: int,
        seconds: float, peak_tflops: float) -> float:
    """MFU in percent of a step that took `seconds`."""
    flops = flops_per_token(gpt(layers, hidden_size, heads, vocab_size, seq_length), seq_length) * batch * seq_length
    return 100 * flops / (gpus * seconds * peak_tflops * 1e12)


QUANTITIES: dict[str, Callable[..., float]] = {
    each.__name__: each for each in (parameters, states, engine_states, largest_model, mfu)}


@dataclass(frozen=True)
class Table:
    """Published numbers, each of which this project's formulas give again from the other cells of its row."""

    table: str  # its name
    quantity: str  # one of QUANTITIES
    columns: list[str]  # arguments of the quantity, then "published"
    rows: list[list[float]]
    settings: dict[str, float] = field(default_factory=dict)  # arguments that are the same in all rows
    within: float = 0.0  # allowed relative deviation; 0: equal as printed, rounded or truncated
    because: str = ""  # why a deviation is allowed

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES:
            raise ValueError(f"{self.table}: the quantity {self.quantity} is none of {', '.join(QUANTITIES)}")
        needed = [*inspect.signature(QUANTITIES[self.quantity]).parameters, PUBLISHED]
        if sorted([*self.columns, *self.settings]) != sorted(needed) or self.columns[-1:] != [PUBLISHED]:
            raise ValueError(f"{self.table}: columns and settings are not {', '.join(needed)}, the last one at the end")
        if any(len(row) != len(self.columns) for row in self.rows) or not self.rows:
            raise ValueError(f"{self.table}: a row does not have the {len(self.columns)} cells of the columns")

    @property
    def title(self) -> str:
        return self.table

    def names(self) -> list[str]:
        return []  # it is not about runs

    def here(self, row: list[float]) -> float:
        """Return the number of a row by this project's formulas."""
        cells = dict(zip(self.columns[:-1], row[:-1], strict=True))
        return QUANTITIES[self.quantity](**self.settings, **cells)

    def result(self, curves: Mapping[str, Curve]) -> Result:
        found = [(self.here(row), row[-1]) for row in self.rows]
        if not self.within:
            equal = sum(_is_as_printed(here, published) for here, published in found)
            return Result(equal == len(found), f"{self.table}: {equal} of {len(found)} numbers equal as printed")
        worst, published = max(found, key=lambda pair: abs(pair[0] / pair[1] - 1))
        return Result(abs(worst / published - 1) <= self.within,
                      f"{self.table}: {len(found)} numbers, the largest deviation is {worst:.4g} instead of "
                      f"{published:g} ({worst / published - 1:+.1%}), allowed {self.within:.0%}: {self.because}")

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        return _markdown([*self.columns, "here"], [[*(f"{cell:g}" for cell in row[:-1]), str(row[-1]),
                                                    f"{self.here(row):.4g}"] for row in self.rows])


def _is_as_printed(number: float, published: float) -> bool:
    """Return whether a number has the published digits, if it is rounded or truncated to as many decimals."""
    decimals = len(str(published).partition(".")[2])
    unit = 10.0 ** -decimals
    return -unit / 2 - _ROUNDING <= number - published < unit - _ROUNDING


@dataclass(frozen=True)
class Formula:
    """Bytes that a block keeps in a published configuration: s b h (A + B / t + C a s / (h t)).

    The lists are [A, B, C]; s is the sequence length, b the micro-batch, h the hidden size, a the number of heads, and
    t the number of tensor-parallel ranks.
    """

    configuration: str
    published: list[float]
    differences: dict[str, list[float]] = field(default_factory=dict)  # what this project does not keep: reason -> list
    tensor_parallel: int = 1
    recompute: bool = False  # complete blocks are recomputed
    percent: list[float] = field(default_factory=list)  # published bounds, of the first configuration with ranks

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or len(self.percent) not in (0, 2):
            raise ValueError(f"{self.configuration}: tensor_parallel is at least 1, and percent is [low, high]")

    def factor(self, coefficients: list[float], model: ModelConfig, seq_length: int) -> float:
        """Return A + B / t + C a s / (h t)."""
        constant, divided, scores = coefficients
        per_rank = divided + scores * model.num_heads * seq_length / model.hidden_size
        return constant + per_rank / self.tensor_parallel

    def here(self, model: ModelConfig, seq_length: int) -> float:
        """Return what a block of this project keeps on a GPU, in multiples of s b h bytes."""
        batch = MicroBatch(seq_length, seq_length, 2, cuda=True, tensor_parallel_size=self.tensor_parallel)
        kept = hidden_states_bytes(model, batch) if self.recompute else block_saved(model, batch)
        return kept / (seq_length * model.hidden_size)


class _Row(NamedTuple):
    """A formula for a model, in multiples of s b h bytes."""

    model: str
    formula: Formula
    published: float
    here: float
    compared: float  # here, with the differences
    percent: float  # `compared`, of the first published configuration with tensor parallelism


@dataclass(frozen=True)
class Activations:
    """Published formulas of activations: what a block of this project keeps, and the differences, are their values."""

    activations: str  # the table's name
    models: dict[str, list[int]]  # name -> [layers, hidden_size, heads]
    formulas: list[Formula]
    within: float  # allowed relative deviation
    because: str
    seq_length: int = 2048

    def __post_init__(self) -> None:
        lists = [each for formula in self.formulas for each in (formula.published, *formula.differences.values())]
        sizes = {len(each) for each in lists} | {len(each) for each in self.models.values()}
        if sizes != {3} or not self.formulas or not self.models:
            raise ValueError(f"{self.activations}: each model has [layers, hidden_size, heads], each formula [A, B, C]")

    @property
    def title(self) -> str:
        return self.activations

    def names(self) -> list[str]:
        return []  # it is not about runs

    def _rows(self) -> list[_Row]:
        rows = []
        baseline = next((each for each in self.formulas if each.tensor_parallel > 1), self.formulas[0])
        for name, (layers, hidden_size, heads) in self.models.items():
            model = gpt(layers, hidden_size, heads, seq_length=self.seq_length)
            whole = baseline.factor(baseline.published, model, self.seq_length)
            for formula in self.formulas:
                here = formula.here(model, self.seq_length)
                added = sum(formula.factor(each, model, self.seq_length) for each in formula.differences.values())
                rows.append(_Row(name, formula, formula.factor(formula.published, model, self.seq_length), here,
                                 here + added, 100 * (here + added) / whole))
        return rows

    def result(self, curves: Mapping[str, Curve]) -> Result:
        rows = self._rows()
        worst = max(rows, key=lambda row: abs(row.compared / row.published - 1))
        outside = [f"{row.model}, {row.formula.configuration}: {row.percent:.1f}% of the baseline" for row in rows
                   if row.formula.percent and not row.formula.percent[0] <= row.percent <= row.formula.percent[1]]
        text = f"{self.activations}: {len(rows)} numbers, the largest deviation is {worst.compared:.4g} instead of " \
               f"{format_number(worst.published, 4)} s b h ({worst.model}, {worst.formula.configuration}), " \
               f"allowed {self.within:.0%}: {self.because}"
        is_met = abs(worst.compared / worst.published - 1) <= self.within and not outside
        return Result(is_met, "; ".join([text, *outside]))

    def lines(self) -> list[str]:
        """Return the table in Markdown, in multiples of s b h bytes."""
        return _markdown(
            ["model", "configuration", PUBLISHED, "here", "with the differences", "percent of the baseline",
             "differences"],
            [[row.model, row.formula.configuration, f"{row.published:.4g}", f"{row.here:.4g}", f"{row.compared:.4g}",
              f"{row.percent:.1f}", ", ".join(row.formula.differences)] for row in self._rows()])


def _markdown(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
