"""Batch size and peak learning rate by the size of the model: the defaults of `ds-pretrain new`."""

import math
from dataclasses import dataclass

FEWEST_STEPS = 1000  # a shorter run gets a smaller batch: its schedule would otherwise have too few steps (assumption)


@dataclass(frozen=True)
class SizeDefaults:
    """Settings with which a model of this size was published."""

    name: str
    num_parameters: float
    batch_tokens: float  # tokens of a step
    learning_rate: float  # peak rate
    source: str


_GPT3, _PYTHIA = "arXiv 2005.14165, table 2.1", "arXiv 2304.01373, table 1"
# Both trained with Adam, betas 0.9 and 0.95, weight decay 0.1 (Pythia: 0.01), clipping at 1.0, and a cosine to 10% of
# the peak rate, which are the defaults here. Pythia's batch of 2M tokens is that of all its sizes; the first row has
# GPT-3's smallest batch instead.
_ROWS = (
    SizeDefaults("Pythia 70M", 70e6, 0.5e6, 10e-4, _PYTHIA),
    SizeDefaults("GPT-3 125M", 125e6, 0.5e6, 6.0e-4, _GPT3),
    SizeDefaults("GPT-3 350M", 350e6, 0.5e6, 3.0e-4, _GPT3),
    SizeDefaults("GPT-3 760M", 760e6, 0.5e6, 2.5e-4, _GPT3),
    SizeDefaults("GPT-3 1.3B", 1.3e9, 1e6, 2.0e-4, _GPT3),
    SizeDefaults("GPT-3 2.7B", 2.7e9, 1e6, 1.6e-4, _GPT3),
    SizeDefaults("GPT-3 6.7B", 6.7e9, 2e6, 1.2e-4, _GPT3),
    SizeDefaults("GPT-3 13B", 13e9, 2e6, 1.0e-4, _GPT3),
    SizeDefaults("GPT-3 175B", 175e9, 3.2e6, 0.6e-4, _GPT3),
)


def size_defaults(num_parameters: int) -> SizeDefaults:
    """Return the settings of the published model whose size is nearest, by the ratio of the sizes."""
    return min(_ROWS, key=lambda row: abs(math.log(row.num_parameters / num_parameters)))
