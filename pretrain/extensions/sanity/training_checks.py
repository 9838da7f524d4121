"""Checks of gradients and parameter groups, and checks that train.

These are two equal steps, one batch that must be learned, and inputs from which it cannot be learned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pretrain.checkpoint.format.fragments import base_optimizer, flat_tensors, group_of
from pretrain.config.plan import Plan
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather
from pretrain.engine.optimizer import peak_learning_rate
from pretrain.errors import format_number
from pretrain.extensions.sanity.batches import SmallBatch
from pretrain.extensions.sanity.checked_engine import CheckedEngine, Gradients
from pretrain.extensions.sanity.extension import Result, not_made

REAL_STEPS = 2  # steps with the run's batches, before the training on one small batch
_REPORTED_STEPS = 10  # steps between two reports of the progress
_FASTER, _SLOWER = 1.15, 0.5  # factors of the rate after a lower and a higher loss
_LEARNED = 0.05  # nats above the lowest possible loss
_STALLED_STEPS, _STALLED = 100, 0.99  # the training ends if the loss does not fall by this factor in so many steps
_SATURATED = 0.9  # fraction of a cap of the logits, which tanh reaches slowly
_PROBE = 1e-4  # rate of the step that measures the size of an update, which is proportional to the rate
_SMALLEST_UPDATE, _LARGEST_UPDATE = 1e-5, 0.5  # relative; AdamW's first update has 0.01 to 0.1 at usual rates
_TRAINED_UPDATES = 3e-3, 0.1  # relative; updates at which the checks train
_WORSE = 0.9  # a baseline must have at least this fraction of the lowest loss that is possible without the tokens
_NORM_DIFFERENCE = 0.05  # relative: 16-bit gradients are rounded, and summed in another order
_LOWEST_RATIO, _HIGHEST_RATIO = 0.75, 1.33  # a wrong scale differs by a factor of 2 or more
# nats, of the finite difference: above the rounding of a 16-bit loss. The smaller ones are for a steep loss, whose
# third derivative makes the first difference too small: the error falls with the square
_LOSS_CHANGES = 0.05, 0.0125, 0.003
_KEPT_FRACTION = 0.5  # enough of the squared norm
_LARGEST_SPREAD = 1e4  # between the gradient norms of two layers; at initialization, 20 to 100 are usual
_MOST_NAMED = 4


FirstSteps = tuple[list[float], list[int]]
"""The losses of the first steps of the run at its peak rate, and checksums of the weights after them."""


@dataclass(frozen=True)
class OneBatch:
    """Training on one small batch."""

    small: SmallBatch
    losses: list[float]  # before each update
    rates: list[float]
    lowest: float  # nats, that any model can reach
    without_tokens: float  # nats, that a model can reach that does not use the tokens

    @property
    def bound(self) -> float:
        """Loss in nats at which the batch is learned."""
        return self.lowest + _LEARNED

    @property
    def succeeded(self) -> bool:
        """True if the loss fell below the bound."""
        return min(self.losses) <= self.bound


def check_update_size(checked: CheckedEngine, small: list[MicroBatch]) -> tuple[Result, float]:
    """Check the size of an update at the peak rate. Also returns the rate at which the other checks train.

    This is the peak rate unless its updates would be far too large or too small: such a rate fails this check alone.
    """
    peak = peak_learning_rate(checked.plan)
    update = checked.relative_update(small, _PROBE) * peak / _PROBE
    if not update > 0:
        return not_made("update size", "the weights are not in memory, or the update is 0"), peak
    way = "high" if update > _LARGEST_UPDATE else "low"
    low, high = _TRAINED_UPDATES
    return Result("update size", _SMALLEST_UPDATE <= update <= _LARGEST_UPDATE,
                  f"an update at the peak rate {peak:g} has {update:.1e} of the weights' norm",
                  f"{_SMALLEST_UPDATE:g} to {_LARGEST_UPDATE:g}",
                  f"the learning rate is far too {way}: `ds-pretrain find-lr` suggests one",
                  update), peak * min(max(update, low), high) / update


def first_steps(checked: CheckedEngine, consumed_samples: int, lr: float) -> FirstSteps:
    """Train the first steps of the run, at a constant rate."""
    losses = list[float]()
    for _ in range(REAL_STEPS):
        losses.append(checked.train(checked.batches(consumed_samples), lr))
        consumed_samples += checked.plan.length.batch_sizes.at(consumed_samples)
    return losses, checked.weights_checksum()


def check_determinism(first: FirstSteps, second: FirstSteps, *, is_exact: bool) -> Result:
    """Compare two trainings of the first steps from the same state."""
    (losses, checksums), (losses_again, checksums_again) = first, second
    difference = max(abs(a - b) / abs(a) for a, b in zip(losses, losses_again, strict=True))
    equal_weights = checksums == checksums_again
    bound = "equal, bit by bit" if is_exact else "relative difference of losses at most 1e-3"
    weights = "equal" if equal_weights else "different"
    return Result("determinism", (difference == 0 and equal_weights) if is_exact else difference <= 1e-3,
                  f"relative difference of losses {difference:.1e}; {weights} weights", bound,
                  "two equal starts differ: a random generator is not seeded, or an operator is not deterministic",
                  difference)


def learn_one_batch(checked: CheckedEngine, small: SmallBatch, steps: int, rate: float,
                    report: Callable[[str], None]) -> OneBatch:
    """Train on one small batch until its loss is near the lowest possible one, at most `steps` steps.

    The rate begins at `rate`. It grows after each step with a lower loss, and is halved after each step with a higher
    one ("bold driver", Battiti 1989), so that the check does not depend on a well-chosen rate.
    """
    learned = OneBatch(small, [], [], lowest_loss(checked.plan, small), small.entropy_by_position())
    losses, rates = learned.losses, learned.rates
    for step in range(steps):
        rates.append(rate)
        losses.append(checked.train(small.micro_batches, rate))
        if step % _REPORTED_STEPS == 0:
            report(f"learning one batch, step {step + 1} of at most {steps}: loss {losses[-1]:.3f}")
        if learned.succeeded or not math.isfinite(losses[-1]) or _has_stalled(losses):
            break
        if len(losses) > 1:
            rate *= _FASTER if losses[-1] < losses[-2] else _SLOWER
    return learned


def lowest_loss(plan: Plan, small: SmallBatch) -> float:
    """Return the loss in nats that a model can reach on the batch; collective.

    It is 0, unless equal prefixes have different labels. If the logits have a cap c, the largest probability is that of
    one logit c and V - 1 logits -c.
    """
    cap = plan.model.logit_softcap * _SATURATED
    of_cap = math.log1p((plan.model.vocab_size - 1) * math.exp(-2 * cap)) if cap else 0.0
    return small.entropy_by_prefix() + of_cap


def _has_stalled(losses: list[float]) -> bool:
    earlier = losses[:-_STALLED_STEPS]
    return bool(earlier) and min(losses) > _STALLED * min(earlier)


def check_one_batch(learned: OneBatch) -> Result:
    """Check that the loss of the one batch fell below the bound."""
    best = min(learned.losses)
    return Result("one batch is learned", learned.succeeded,
                  f"{learned.losses[0]:.3f} to {best:.3f} in {len(learned.losses)} steps",
                  f"at most {learned.bound:.3f} (the lowest possible is {learned.lowest:.3f})",
                  "the model cannot memorize one small batch: correct the other failed checks first; if there are "
                  "none, look for noise in the forward pass, and at the sign and weight decay of the updates, or allow "
                  "more --overfit_steps", best)


def train_baseline(checked: CheckedEngine, learned: OneBatch, kind: str, seed: int,
                   report: Callable[[str], None]) -> float:
    """Repeat the training on the one batch with the same rates, but useless inputs. Returns the last loss.

    If the real inputs were not learned, there is nothing to compare with, and nothing is trained.

    `kind`: "zeroed" replaces all tokens by token 0, "shuffled" puts them into another order in each step.
    """
    generator, loss = torch.Generator().manual_seed(seed), math.nan
    for step, rate in enumerate(learned.rates if learned.succeeded else ()):
        inputs = learned.small.zeroed() if kind == "zeroed" else learned.small.shuffled(generator)
        loss = checked.train(inputs, rate)
        if step % _REPORTED_STEPS == 0:
            report(f"{kind} inputs, step {step + 1} of {len(learned.rates)}: loss {loss:.3f}")
    return loss


def check_baseline(kind: str, loss: float, learned: OneBatch) -> Result:
    """Check that useless inputs gave no lower loss than is possible without the tokens."""
    name = f"{kind} inputs are worse"
    if not learned.succeeded:
        return not_made(name, "the one batch was not learned")
    return Result(name, loss >= _WORSE * learned.without_tokens or not math.isfinite(loss), f"loss {loss:.3f}",
                  f"at least {_WORSE} of {learned.without_tokens:.3f}, the lowest without the tokens",
                  "the loss does not depend on the tokens: the model sees the labels, or the place in the batch, in "
                  "another way", loss)


def check_gradients_reach(checked: CheckedEngine, gradients: Gradients) -> Result:
    """Check that each parameter is trained: it has a gradient other than zero, and the optimizer updates it."""
    frozen = {name for names in gather([name for name, parameter in checked.parameters()
                                        if not parameter.requires_grad]) for name in names}
    updated = {name for names in gather(list(_decay_of_parameters(checked))) for name in names}
    missing = sorted(name for name, norm in gradients.norms.items()
                     if name in frozen or name not in updated or math.isnan(norm) or norm == 0)
    total = len(gradients.norms)
    return Result("gradients reach", not missing,
                  f"{total - len(missing)} of {total} parameters" + (f"; not {_name(missing)}" if missing else ""),
                  "all parameters have a gradient and are in the optimizer",
                  "a parameter is frozen (requires_grad), detached from the loss, or not given to the optimizer",
                  float(len(missing)))


def _name(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def check_gradient_scale_of_layers(gradients: Gradients) -> Result:
    """Check that all gradients are finite, and that the layers' gradient norms have a similar magnitude."""
    wrong = sorted(name for name, norm in gradients.norms.items() if math.isinf(norm))
    squares: dict[str, float] = {}
    for name, norm in gradients.norms.items():
        if math.isfinite(norm):
            layer = ".".join(name.split(".")[:2 if name.startswith("tied_modules") else 1])
            squares[layer] = squares.get(layer, 0.0) + norm ** 2
    layers = {layer: math.sqrt(square) for layer, square in squares.items() if square > 0}
    if not layers:
        return Result("gradient sizes", False, "no finite gradient", "finite", "see the other checks")
    low, high = (of(layers, key=lambda layer: layers[layer]) for of in (min, max))
    spread = layers[high] / layers[low]
    return Result("gradient sizes", not wrong and spread <= _LARGEST_SPREAD,
                  f"norms of layers {layers[low]:.2g} ({low}) to {layers[high]:.2g} ({high})" +
                  (f"; not finite: {_name(wrong)}" if wrong else ""), f"finite, within a factor of {_LARGEST_SPREAD:g}",
                  "gradients vanish or explode over the depth: check norms, residual connections and --init_method",
                  spread)


def check_gradient_norm(checked: CheckedEngine, gradients: Gradients) -> Result:
    """Compare the gradient norm that the engine reports and clips with the norm of the gradients themselves."""
    if checked.plan.layout.optimizer == "muon":
        return not_made("gradient norm", "Muon reports the norm of its normalized gradients")
    own = math.sqrt(sum(norm ** 2 for norm in gradients.norms.values() if math.isfinite(norm)))
    ratio = gradients.norm / own if own else math.nan
    return Result("gradient norm", abs(ratio - 1) <= _NORM_DIFFERENCE,
                  f"reported {gradients.norm:.4g}, of the gradients {own:.4g}",
                  f"equal within {_NORM_DIFFERENCE:.0%}",
                  "the optimizer divides by another loss scale, or sums the norm over other ranks: clipping is wrong",
                  ratio)


def check_gradient_scale(checked: CheckedEngine, batches: list[MicroBatch], gradients: Gradients) -> Result:
    """Compare the gradients with a finite difference: move the weights along them, and measure the change of the loss.

    The difference is central, and is divided by the actual change of the rounded weights. A loss scale that is not
    undone, or gradients that are summed instead of averaged, give a wrong factor. Matrices whose gradients Muon has
    normalized are left out.
    """
    normalized = {name for names in gather([name for name, parameter in checked.parameters()
                                            if getattr(parameter, "use_muon", False)]) for name in names}
    chosen = _largest({name: norm for name, norm in gradients.norms.items() if name not in normalized})
    kept = checked.gradients(batches, keep=frozenset(chosen)).kept
    square = sum(gradients.norms[name] ** 2 for name in chosen)
    if not chosen or not math.isfinite(square):
        return Result("gradient scale", False, "no finite gradient", "1", "see the other checks")
    ratio = math.inf
    for change in _LOSS_CHANGES:
        ratio = _ratio_to_difference(checked, batches, kept, change / square)
        if _LOWEST_RATIO <= ratio <= _HIGHEST_RATIO:
            break
    return Result("gradient scale", _LOWEST_RATIO <= ratio <= _HIGHEST_RATIO,
                  f"{format_number(ratio)} times the finite difference of the loss",
                  f"{_LOWEST_RATIO} to {_HIGHEST_RATIO}",
                  f"the gradients are too {'small' if ratio < 1 else 'large'}: check the loss scale, and the division "
                  "by the number of micro-batches and ranks", ratio)


def _ratio_to_difference(checked: CheckedEngine, batches: list[MicroBatch], kept: dict[str, torch.Tensor],
                         length: float) -> float:
    """Return the change of the loss that the gradients predict, divided by the measured one, for a move both ways."""
    losses, moves = [], []
    for sign in (1, -1):
        with checked.moved(kept, sign * length) as product:
            losses.append(checked.training_loss(batches))
            moves.append(product)
    predicted, measured = moves[0] - moves[1], losses[0] - losses[1]
    return predicted / measured if measured else math.inf


def _largest(norms: dict[str, float]) -> list[str]:
    """Return the parameters with the largest gradients, up to a fraction of the squared norm; the same on all ranks."""
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm) and norm > 0}
    target, found = _KEPT_FRACTION * sum(norm ** 2 for norm in finite.values()), list[str]()
    for name in sorted(finite, key=lambda name: (-finite[name], name)):
        if sum(finite[other] ** 2 for other in found) < target:
            found.append(name)
    return found


def check_weight_decay(checked: CheckedEngine) -> Result:
    """Check that the optimizer does not decay vectors (norms and biases)."""
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in checked.parameters()}
    own = {name: (decay, len(shapes[name])) for name, decay in _decay_of_parameters(checked).items()}
    decays = {name: value for of_rank in gather(own) for name, value in of_rank.items()}
    wrong = sorted(name for name, (decay, dimensions) in decays.items() if decay != 0 and dimensions < 2)
    decayed = sum(decay != 0 for decay, _ in decays.values())
    return Result("weight decay", not wrong,
                  f"{decayed} of {len(decays)} parameters decay" + (f", also {_name(wrong)}" if wrong else ""),
                  "no vector (norm, bias) decays", "give vectors a parameter group with weight_decay 0",
                  float(len(wrong)))


def _decay_of_parameters(checked: CheckedEngine) -> dict[str, float]:
    """Return the weight decay of the parameters that this rank's optimizer updates, by name."""
    groups = base_optimizer(checked.engine).param_groups
    return {fragment.name: float(groups[group_of(checked.engine, flat)].get("weight_decay", 0.0))
            for flat in flat_tensors(checked.engine) for fragment in flat.fragments}
