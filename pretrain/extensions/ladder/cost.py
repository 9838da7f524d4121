"""Times and alternatives of the target's run: other numbers of tokens, and other sizes for the same compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import ConfigError
from pretrain.extensions.ladder.expected_curve import counted_parameters
from pretrain.extensions.ladder.fit import compute_optimal
from pretrain.extensions.ladder.ladder_file import DECAYED, Ladder
from pretrain.extensions.ladder.law import Law
from pretrain.extensions.ladder.plan import Plan
from pretrain.extensions.ladder.reach import Reach
from pretrain.extensions.ladder.sizes import scaled_config
from pretrain.extensions.ladder.target import TargetRun
from pretrain.memory.compare.compare import step_estimates
from pretrain.memory.hardware import make_cluster
from pretrain.model.description import ModelConfig
from pretrain.monitor.expected import Expected

StepSeconds = Callable[[ModelConfig], float]
_TOKEN_FACTORS = (0.25, 0.5, 1.0, 2.0)
_SIZE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the target's parameters
_FLOPS_PER_PARAMETER = 6  # and token, forward and backward


@dataclass(frozen=True)
class Option:
    """A run that could be trained instead of the target's, and its expected loss at the end of a decay."""

    parameters: float
    tokens: float
    expected: Expected
    reach: Reach
    seconds: float | None  # None: not known


def step_seconds(target: TargetRun, plan: Plan, folder: Path, gpu: str | None) -> StepSeconds | None:
    """Return a function that predicts the step time of a model in the target's layout; None if nothing can.

    Without `gpu`, the prediction is fitted to the smaller runs.
    """
    layout = target.plan.layout
    if gpu is not None:
        estimates = step_estimates(make_cluster(gpu=gpu, world_size=layout.world_size, nodes=None, gpus_per_node=None))
    else:
        try:
            estimates = step_estimates(None, [str(folder / "runs" / model.name)
                                              for model in (plan.models[0], plan.models[-1])])
        except ConfigError:  # runs without step times
            return None
    return None if estimates is None else lambda model: float(estimates(layout, model)["step_seconds"])


def token_options(target: TargetRun, ladder: Ladder, seconds: StepSeconds | None) -> list[Option]:
    """Return the target's model with other numbers of tokens."""
    return [_option(ladder, target, target.parameters, factor * target.tokens, target.plan.model, seconds)
            for factor in _TOKEN_FACTORS]


def size_options(target: TargetRun, ladder: Ladder, seconds: StepSeconds | None) -> list[Option]:
    """Return models in the target's proportions, with the tokens that need the compute of the target's run."""
    flops, heads = compute_of(target), target.plan.model.num_heads
    ratio = heads // target.plan.model.num_kv_heads
    found: dict[int, Option] = {}
    for factor in _SIZE_FACTORS:
        number = max(1, round(heads * factor ** (1 / 3)))
        if ratio > 1:
            number = max(ratio, round(number / ratio) * ratio)
        model = target.plan.model if number == heads else scaled_config(
            target.plan.model, heads=number, kv_heads=max(1, number // ratio),
            layers=max(1, round(target.plan.model.num_layers * number / heads)))
        size = counted_parameters(model)
        found[size] = _option(ladder, target, size, flops / _FLOPS_PER_PARAMETER / size, model, seconds)
    return [found[size] for size in sorted(found)]


def optimal_option(target: TargetRun, ladder: Ladder) -> Option | None:
    """Return the size with the lowest loss for the compute of the target's run; None if the law has no optimum."""
    try:
        parameters, tokens = compute_optimal(ladder.laws[DECAYED], compute_of(target))
    except ValueError:
        return None
    return _option(ladder, target, parameters, tokens, target.plan.model, None)


def compute_of(target: TargetRun) -> float:
    """Return the compute of the target's run, 6 N D floating-point operations."""
    return float(_FLOPS_PER_PARAMETER * target.parameters * target.tokens)


def _option(ladder: Ladder, target: TargetRun, parameters: float, tokens: float, model: ModelConfig,
            seconds: StepSeconds | None) -> Option:
    laws: Mapping[str, Law] = ladder.laws
    steps = tokens / target.plan.layout.tokens_per_step
    return Option(parameters, tokens, laws[DECAYED].predict(parameters, tokens),
                  Reach.of(ladder.range, parameters, tokens), seconds(model) * steps if seconds else None)
