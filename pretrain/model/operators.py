"""Choose the implementation of each operator of the model: norm, linear, activation, attention, loss.

An `Operator` has a plain implementation, by torch's operators. Extensions offer others, each for some inputs: see
`Offer`. Three things decide, in this order:

- `--plain_operators`, and torch.compile, which cannot trace what an extension computes: the plain implementation.
- `Offer.applies`: dtype, device, shapes and settings of the inputs. The first offer that applies computes them.
- The choice of `Kernels`, made once at the start of a run, for all ranks, and recorded in its folder for its resumes:
  an offer that is not chosen does not apply.

What offers keep for the backward pass, for estimates of memory: `OperatorMemory` (operator_memory.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pretrain.active_extensions import functions

if TYPE_CHECKING:
    from pretrain.config.plan import Plan

T = TypeVar("T")


class Operator(Generic[T]):
    """An operator of the model.

    Args:
        plain: computes it by torch's operators, for all inputs. Offers have the type of `plain`, or a subclass.
    """

    def __init__(self, plain: T) -> None:
        self.plain = plain
        self.offers: list[Offer[T]] = []  # of all extensions; the first one that applies computes

    def choose(self, *inputs: Any, plain: bool = False) -> T:
        """Return the implementation for these inputs. `plain`: the one of torch."""
        if plain or torch.compiler.is_compiling():
            return self.plain
        if _kernels is None:
            all_kernels()
        for offer in self.offers:
            if offer.applies(*inputs):
                return offer.implementation
        return self.plain


@dataclass(frozen=True)
class Offer(Generic[T]):
    """An implementation of an operator by an extension."""

    name: str  # for people
    operator: Operator[T]
    applies: Callable[..., bool]  # for the inputs of `Operator.choose`; it is called each time, and must be quick
    implementation: T


class Kernels:
    """Offers of an extension, and decisions about them (Extension.operators). Override what it needs."""

    def offers(self) -> Iterable[Offer[Any]]:
        """Return the offers, which each process that computes a model may use."""
        return ()

    def choose(self, plan: "Plan") -> None:
        """Decide which offers the run uses. Collective: all ranks must decide the same, and a resume as before."""

    def simulate(self, tensor_type: type[torch.Tensor]) -> None:
        """Choose without other ranks, and from now on allocate as for real tensors but compute nothing.

        Args:
            tensor_type: of the tensors of the simulation, which have no memory.
        """


_kernels: list[Kernels] | None = None  # of all extensions; None: not asked for yet


def all_kernels() -> list[Kernels]:
    """Return the kernels of all extensions. The first call imports them."""
    global _kernels
    if _kernels is None:
        _kernels = []  # while they are imported, the plain implementations compute
        _kernels += [make() for _, make in functions("operators")]
        for kernels in _kernels:
            for offer in kernels.offers():
                offer.operator.offers.append(offer)
    return _kernels


def choose_operators(plan: "Plan") -> None:
    """Let all extensions choose what this run uses, at its start. Collective."""
    for kernels in all_kernels():
        kernels.choose(plan)
