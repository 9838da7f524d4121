"""The plan of a ladder: which models, how many steps, and how long they take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pretrain.commands.small_runs import Run
from pretrain.errors import ConfigError, counted
from pretrain.extensions.ladder.ladder_file import LARGEST_FACTOR, Range, Reach
from pretrain.extensions.ladder.target import FEWEST_SIZES, Size, TargetRun, choose_sizes, family_sizes, nearest_sizes

COUNTS = 3  # numbers of tokens of each model, each twice the one before
MODELS, SPREAD = 5, 16.0  # models, and the largest one's parameters divided by the smallest one's
FEWEST_STEPS = 100  # fewest steps of the shortest runs, if the batch can be halved
TOKENS_PER_PARAMETER = 20  # at least this number in the longest runs, unless target or data have fewer (Chinchilla)
LARGEST_FRACTION = 0.5  # fraction of the target's parameters
_FORWARD = 1 / 3  # fraction of the time of a step
_MICRO_BATCH_TOKENS = 2048  # at least, where the batch has them: small matrices are slow
_SEARCHES = 40


class Times(Protocol):
    """Measured or predicted times on this machine."""

    @property
    def start_seconds(self) -> float:
        """Seconds of a run without its steps."""

    def step_seconds(self, size: Size, batch: "Batch") -> float:
        """Return the seconds of a training step."""


@dataclass(frozen=True)
class Batch:
    """The batch of all runs of the ladder, in samples."""

    global_batch_size: int
    micro_batch_size: int
    seq_length: int

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_length

    @staticmethod
    def of(global_batch_size: int, *, ranks: int, target: TargetRun) -> "Batch":
        """Choose the micro-batch: the target's, or the smallest larger one with enough tokens."""
        of_rank, seq_length = global_batch_size // ranks, target.plan.args.seq_length
        least = max(target.plan.layout.micro_batch_size, _MICRO_BATCH_TOKENS // seq_length)
        divisors = [number for number in range(1, of_rank + 1) if of_rank % number == 0]
        return Batch(global_batch_size, next((number for number in divisors if number >= least), of_rank), seq_length)


@dataclass(frozen=True)
class Lengths:
    """Steps of the runs of each model: one run has the largest number; the others branch off its stable phase."""

    shortest: int  # steps; the other numbers are its multiples
    stable: int  # steps before the decay of the learning rate, among these
    warmup: int
    counts: int = COUNTS

    def steps(self) -> list[int]:
        """Return the numbers of steps in ascending order."""
        return [self.shortest * 2**index for index in range(self.counts)]

    def decay_start(self, steps: int) -> int:
        """Return the last step of the stable phase in a run of this length."""
        return self.stable * (steps // self.shortest)


@dataclass(frozen=True)
class Model:
    """A model of the ladder, and its predicted times."""

    name: str
    config: dict[str, Any]  # the content of its config.json
    parameters: int  # see counted_parameters
    learning_rate: float
    step_seconds: float
    seconds: float  # seconds of all its runs, with starts and evaluations


@dataclass(frozen=True)
class Plan:
    """The content of plan.json."""

    target: dict[str, Any]  # what the plan was made for: see `_request` in main.py
    models: list[Model]  # in ascending order of the parameters
    batch: Batch
    lengths: Lengths
    eval_steps: int
    start_seconds: float
    ranks: int

    @property
    def seconds(self) -> float:
        return sum(model.seconds for model in self.models)

    @property
    def tokens(self) -> list[int]:
        return [steps * self.batch.tokens for steps in self.lengths.steps()]

    def runs(self, model: Model) -> list[Run]:
        """Return the runs of a model: the longest one first, from which the others branch off."""
        *branches, longest = self.lengths.steps()
        flags = {"model": f"models/{model.name}.json", "learning_rate": model.learning_rate,
                 "global_batch_size": self.batch.global_batch_size, "micro_batch_size": self.batch.micro_batch_size,
                 "lr_warmup_steps": self.lengths.warmup, "eval_steps": self.eval_steps,
                 "log_interval": max(1, self.lengths.shortest // 20)}
        every = self.lengths.stable  # evaluations, and the checkpoints from which the branches begin
        runs = [Run(model.name, self.ranks, {**flags, **self._length(longest), "save_interval": every,
                                             "eval_interval": every})]
        for steps in branches:
            start = self.lengths.decay_start(steps)
            runs.append(Run(f"{model.name}-{steps}", self.ranks, {
                **flags, **self._length(steps), "save_interval": 0, "eval_interval": 0,
                "resume_from": f"runs/{model.name}@{start}", "override": "schedule"}, keep_checkpoint=False))
        return runs

    def _length(self, steps: int) -> dict[str, int]:
        return {"train_steps": steps, "lr_wsd_steps": steps - self.lengths.decay_start(steps)}


@dataclass(frozen=True)
class Wish:
    """The request of the user: the time, and optionally the sizes and the number of tokens."""

    budget_seconds: float
    parameters: Sequence[int] = ()
    tokens: int | None = None  # tokens of the longest runs
    largest_factor: float = LARGEST_FACTOR


def lengths_of(tokens: float, batch: Batch, target: TargetRun) -> Lengths:
    """Return the lengths of the runs, of which the longest have about this number of tokens."""
    shortest = max(2, round(tokens / batch.tokens / 2 ** (COUNTS - 1)))
    stable = min(max(1, round(shortest * (1 - target.decay[0]))), shortest - 1)
    part = target.schedule.warmup_steps / target.plan.train_steps
    warmup = min(max(1, round(part * shortest * 2 ** (COUNTS - 1))), max(1, stable // 2))
    return Lengths(shortest, stable, warmup)


def eval_steps_of(batch: Batch, target: TargetRun) -> int:
    """Return the batches of an evaluation, so that its samples are those of the target's evaluations."""
    args, layout = target.plan.args, target.plan.layout
    return max(1, round(args.eval_steps * layout.global_batch_size / batch.global_batch_size))


def seconds_of(size: Size, batch: Batch, lengths: Lengths, eval_steps: int, times: Times) -> float:
    """Return the seconds of all runs of a model."""
    *branches, longest = lengths.steps()
    steps = longest + sum(each - lengths.decay_start(each) for each in branches)
    evaluations = longest // lengths.stable + 1 + len(branches)
    step_seconds = times.step_seconds(size, batch)
    return step_seconds * (steps + _FORWARD * evaluations * eval_steps) + times.start_seconds * lengths.counts


def make_plan(target: TargetRun, wish: Wish, times: Times, *, ranks: int, request: dict[str, Any]) -> Plan:
    """Choose models and numbers of tokens for the time. Raises ConfigError if nothing fits."""
    sizes = family_sizes(target.plan.model)
    choices = _choices(sizes, target, wish)
    for chosen in choices:
        found = _fitting(chosen, target, wish, times, ranks)
        if found is not None:
            batch, lengths = found
            eval_steps = eval_steps_of(batch, target)
            models = [Model(size.name, size.config.hf_config, size.parameters,
                            target.rate(size.config.hidden_size, batch.tokens), times.step_seconds(size, batch),
                            seconds_of(size, batch, lengths, eval_steps, times)) for size in chosen]
            plan = Plan(request, models, batch, lengths, eval_steps, times.start_seconds, ranks)
            check_reach(plan, target, wish)
            return plan
    raise _too_short(choices[-1], target, wish, times, ranks)


def _choices(sizes: list[Size], target: TargetRun, wish: Wish) -> list[list[Size]]:
    """Return the sets of models to try, the one with the largest models first. Raises ConfigError if there is none."""
    if wish.parameters:
        return [nearest_sizes(sizes, wish.parameters)]
    possible = [size for size in sizes if size.parameters <= LARGEST_FRACTION * target.parameters]
    choices = [choose_sizes(possible, largest=size.parameters, spread=SPREAD, count=MODELS) for size in possible[::-1]]
    choices = [chosen for chosen in choices if len(chosen) >= FEWEST_SIZES]
    if not choices:
        raise ConfigError("--target", problem=f"its model has {counted(target.plan.model.num_heads, 'head')}, and the "
                          f"smaller models of its family keep the head size: there are {len(possible)} with at most "
                          f"half of its parameters, and the fit needs {FEWEST_SIZES}",
                          remedy="give the target smaller heads, or name larger models with --parameters")
    return choices


def _fitting(chosen: Sequence[Size], target: TargetRun, wish: Wish, times: Times,
             ranks: int) -> tuple[Batch, Lengths] | None:
    """Return batch and lengths that fit the budget; None if there are none for these models."""
    most = min(target.tokens, target.data_tokens)
    ratio = max(TOKENS_PER_PARAMETER, target.tokens / target.parameters)
    least = wish.tokens or min(most, ratio * chosen[-1].parameters)

    def planned(tokens: float) -> tuple[Batch, Lengths, float]:
        batch = batch_of(tokens, target, ranks)
        lengths, eval_steps = lengths_of(tokens, batch, target), eval_steps_of(batch, target)
        return batch, lengths, sum(seconds_of(size, batch, lengths, eval_steps, times) for size in chosen)

    *found, seconds = planned(least)
    if seconds > wish.budget_seconds:
        return None
    low, high = least, least if wish.tokens else most
    for _ in range(_SEARCHES):  # the largest number of tokens that fits
        middle = math.sqrt(low * high)
        *larger, seconds = planned(middle)
        if seconds <= wish.budget_seconds:
            low, found = middle, larger
        else:
            high = middle
    batch, lengths = found
    assert isinstance(batch, Batch)
    assert isinstance(lengths, Lengths)
    return batch, lengths


def batch_of(tokens: float, target: TargetRun, ranks: int) -> Batch:
    """Return the target's batch, halved until the shortest runs have enough steps."""
    size = target.plan.layout.global_batch_size
    size = max(ranks, size // ranks * ranks)
    needed = tokens / 2 ** (COUNTS - 1) / FEWEST_STEPS
    while size * target.plan.args.seq_length > needed and size % (2 * ranks) == 0:
        size //= 2
    return Batch.of(size, ranks=ranks, target=target)


def reach_of(plan: Plan, target: TargetRun) -> Reach:
    """Return how far the target lies beyond the smaller runs."""
    fitted = Range([float(plan.models[0].parameters), float(plan.models[-1].parameters)],
                   [float(plan.tokens[0]), float(plan.tokens[-1])])
    return Reach.of(fitted, target.parameters, target.tokens)


def check_reach(plan: Plan, target: TargetRun, wish: Wish) -> None:
    """Raise ConfigError if the target is too far from the largest model, or its tokens from the longest runs."""
    reach = reach_of(plan, target)
    if reach.factor > wish.largest_factor:
        raise ConfigError("--budget", problem=f"{reach}: {wish.largest_factor:g} times is the limit",
                          remedy="give a larger --budget, or allow more with --max_extrapolation")


def _too_short(chosen: Sequence[Size], target: TargetRun, wish: Wish, times: Times, ranks: int) -> ConfigError:
    """Return the error for a budget in which even the smallest models do not fit."""
    tokens = wish.tokens or min(target.tokens, target.data_tokens, TOKENS_PER_PARAMETER * chosen[-1].parameters)
    batch = batch_of(tokens, target, ranks)
    lengths, eval_steps = lengths_of(tokens, batch, target), eval_steps_of(batch, target)
    needed = sum(seconds_of(size, batch, lengths, eval_steps, times) for size in chosen)
    names = ", ".join(size.name for size in chosen)
    return ConfigError("--budget", problem=f"the runs of {names} with up to {tokens:,.0f} tokens take "
                       f"{duration_text(needed)}, and the budget is {duration_text(wish.budget_seconds)}",
                       remedy="give a larger --budget, fewer --tokens, or fewer eval_steps in the YAML")


def duration_text(seconds: float) -> str:
    """Return a time such as 45 s, 12 min or 2.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plan_lines(plan: Plan, target: TargetRun) -> list[str]:
    """Describe the plan."""
    longest = ", ".join(f"{tokens / 1e6:.3g} M" for tokens in plan.tokens)
    lines = [f"target: {target.parameters:,} parameters without embeddings, {target.tokens:,} tokens",
             f"{'model':<12}{'parameters':>12}{'peak rate':>11}{'ms a step':>11}{'all runs':>10}"]
    lines += [f"{model.name:<12}{model.parameters:>12,}{model.learning_rate:>11.2e}{1e3 * model.step_seconds:>11.0f}"
              f"{duration_text(model.seconds):>10}" for model in plan.models]
    lines.append(f"each with {longest} tokens, in steps of {plan.batch.tokens:,}; learning rate: {target.scaling}; "
                 f"total {duration_text(plan.seconds)}")
    reach = reach_of(plan, target)
    return [*lines, str(reach), *([f"warning: {reach.warning()}"] if reach.warning() else [])]
