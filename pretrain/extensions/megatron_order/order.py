"""The two orders: splits, samples of one source, and blends. Loading this module imports no numpy."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pretrain.data.data_spec import DataSpec, parse_split, split_documents
from pretrain.errors import ConfigError

if TYPE_CHECKING:
    from pretrain.data.samples.blend import BlendedSamples
    from pretrain.data.samples.dataset import SequenceRange
    from pretrain.extensions.megatron_order.samples import MegatronSamples


class _Order:
    """The methods that both orders have."""

    name: ClassVar[str]

    def samples(self, part: "SequenceRange", *, seq_length: int, seed: int, num_samples: int,
                name: str) -> "MegatronSamples":
        """Return the samples of a part of a source."""
        from pretrain.extensions.megatron_order.samples import MegatronSamples

        source, first, last = part
        return MegatronSamples(source, order=self.name, seq_length=seq_length, seed=seed, num_samples=num_samples,
                               first_sequence=first, last_sequence=last, name=name)

    def blend(self, parts: "Sequence[SequenceRange]", weights: Sequence[float] | None, *, seq_length: int, seed: int,
              num_samples: int, name: str) -> "BlendedSamples":
        """Return the blend of several parts: see blend.py.

        Raises ConfigError if the blend of Megatron-LM takes more samples of a source than the order of the source has.
        """
        from pretrain.data.samples.blend import BlendedSamples
        from pretrain.extensions.megatron_order.blend import GreedyQuotas, normalized_weights, samples_of_sources

        def samples(number: int, of_source: int) -> "MegatronSamples":
            return self.samples(parts[number], seq_length=seq_length, seed=seed, num_samples=of_source, name=name)

        if self.name == "megatron" and weights is None:
            datasets = [samples(number, 1) for number in range(len(parts))]
            used: list[float] = [data.order_length for data in datasets]
            length = min(num_samples, sum(data.order_length for data in datasets))
        else:
            used = normalized_weights(self.name, weights or [1.0] * len(parts))
            sizes = samples_of_sources(self.name, used, num_samples)
            datasets = [samples(number, size) for number, size in enumerate(sizes)]
            length = sum(math.ceil(num_samples * weight) for weight in used)
            if self.name == "neox":
                length = max(sum(data.order_length - 1 for data in datasets), 1)
        quotas = GreedyQuotas(used, length)
        for data, count in zip(datasets, quotas.counts(length), strict=True):
            if self.name == "megatron" and count > data.order_length:
                raise ConfigError(f"--sample_order {self.name}", problem=f"the blend takes {count:,} {name} samples of "
                                  f"{data.indexed.prefix}, whose order has {data.order_length:,}: Megatron-LM rejects "
                                  "it, too", remedy="give a larger --order_samples, or use --sample_order shuffled")
        return BlendedSamples(datasets, used, name=name, planned=(quotas, num_samples))


class MegatronOrder(_Order):
    """The order of current versions of Megatron-LM."""

    name = "megatron"

    def check(self, spec: DataSpec) -> None:
        """Accept all data."""

    def divide(self, num_sequences: int, fractions: tuple[float, float, float]) -> list[tuple[int, int]]:
        """Return [first, last) sequences of train, valid and test: Megatron-LM rounds each bound."""
        bounds = [round(bound * num_sequences) for bound in itertools.accumulate(fractions, initial=0.0)]
        return list(itertools.pairwise(bounds))

    def check_length(self, spec: DataSpec, length: int, needed: int) -> None:
        """Raise ConfigError if a run needs more samples of a blend without weights than it has."""
        if spec.weights is None and len(spec.train) > 1:
            raise ConfigError("--train_data", found=f"a blend of {length} samples", expected=f"the {needed} that this "
                              "run reads", remedy="give weights: without them, Megatron-LM reads each source once at "
                              "most")


class NeoxOrder(_Order):
    """The order of GPT-NeoX."""

    name = "neox"

    def check(self, spec: DataSpec) -> None:
        """Raise ConfigError if --split takes documents of a blend, which GPT-NeoX does not divide."""
        _, for_valid, for_test = parse_split(spec.split)
        if len(spec.train) > 1 and ((for_valid and not spec.valid) or (for_test and not spec.test)):
            raise ConfigError("--sample_order neox", problem="GPT-NeoX does not divide the sources of a blend, and "
                              f"--split {spec.split} takes documents for validation or test", remedy="give "
                              "--split 1,0,0, and --valid_data for evaluations")

    def divide(self, num_sequences: int, fractions: tuple[float, float, float]) -> list[tuple[int, int]]:
        """Return [first, last) sequences of train, valid and test."""
        return split_documents(num_sequences, fractions)

    def check_length(self, spec: DataSpec, length: int, needed: int) -> None:
        """Raise nothing: more samples than the order has are rejected by the run."""
