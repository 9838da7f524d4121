"""Checks of the gradients and the optimizer's parameter groups, on every kind of engine."""

import math

from pretrain.analysis.sanity.checked_engine import CheckedEngine, Gradients
from pretrain.analysis.sanity.result import Result, not_made
from pretrain.checkpoint.format.fragments import base_optimizer, flat_tensors, group_of
from pretrain.data.loader import MicroBatch
from pretrain.distributed.collectives import gather

_NORM_DIFFERENCE = 0.05  # relative: 16-bit gradients are rounded, and summed in another order
_LOWEST_RATIO, _HIGHEST_RATIO = 0.75, 1.33  # a wrong scale differs by a factor of 2 or more
_LOSS_CHANGE = 0.05  # nats, of the finite difference: far above the rounding of a 16-bit loss
_KEPT_FRACTION = 0.5  # of the squared norm: enough of it
_LARGEST_SPREAD = 1e5  # between the gradient norms of two layers
_MOST_NAMED = 4


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
    length, losses, moves = _LOSS_CHANGE / square, [], []
    for sign in (1, -1):
        with checked.moved(kept, sign * length) as product:
            losses.append(checked.training_loss(batches))
            moves.append(product)
    predicted, measured = moves[0] - moves[1], losses[0] - losses[1]
    ratio = predicted / measured if measured else math.inf
    return Result("gradient scale", _LOWEST_RATIO <= ratio <= _HIGHEST_RATIO,
                  f"{ratio:.3g} times the finite difference of the loss", f"{_LOWEST_RATIO} to {_HIGHEST_RATIO}",
                  f"the gradients are too {'small' if ratio < 1 else 'large'}: check the loss scale, and the division "
                  "by the number of micro-batches and ranks", ratio)


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

