"""Choose the shape of a Llama, the batch size and the peak learning rate by the number of parameters."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from pretrain.model.description import ModelConfig

FEWEST_STEPS = 1000  # a shorter run gets a smaller batch: its schedule would otherwise have too few steps (assumption)
LLAMA = "llama2-7b"  # preset whose proportions the shapes have, such as an MLP 2.7 times as wide
# (hidden size up to which heads have this size, size of a head, heads): numbers of heads that divide among ranks
_HEADS = ((512, 32, (2, 3, 4, 5, *range(6, 17, 2))), (2048, 64, (*range(2, 16, 2), *range(16, 33, 4))),
          (32768, 128, (20, *range(24, 257, 8))))
_LARGE = 1e9  # parameters. Below, rows of the vocabulary count once, as in the small models of Llama 3.2 and Qwen 3
# Layers for each 128 of the hidden size: 0.9 to 1.5 in Llama 2 and GPT-3 from 1.3B on, 2 to 3 in GPT-3's small models.
_DEPTH, _DEPTH_OF_SMALL = 1.4, 2.0
_FEWEST_LAYERS, _MOST_LAYERS = 4, 1000
_LARGEST_ERROR = 0.05  # of the number of parameters
_LARGEST_VOCABULARY = 1 / 3  # of the parameters, if the vocabulary can be chosen
VOCABULARIES = (32000, 24000, 16000, 12000, 8000, 6000, 4000, 3000, 2000, 1500, 1000, 700, 500, 300)


def llama_shape(num_parameters: int, vocab_size: int, where: str) -> tuple[str, ModelConfig]:
    """Return the overrides of the preset LLAMA that give this number of parameters within 5%, and the model.

    Raises ConfigError, which names `where`, if there is none.
    """
    shapes = [_with_layers(size * heads, heads, num_parameters, vocab_size)
              for widest, size, numbers in _HEADS for heads in numbers if size * heads <= widest]
    near = [(overrides, model) for overrides, model in shapes
            if abs(model.num_parameters() / num_parameters - 1) <= _LARGEST_ERROR]
    if not near:
        problem = f"there is no Llama of {num_parameters:,} parameters with a vocabulary of {vocab_size:,}"
        if num_parameters < (smallest := shapes[0][1].num_parameters()):
            problem += f"; the smallest one has {smallest:,}"
        raise ConfigError(where, problem=problem, remedy="give another size, a tokenizer with another number of "
                                                         "tokens, or a config.json")
    depth = _DEPTH_OF_SMALL if num_parameters < _LARGE else _DEPTH
    return min(near, key=lambda shape: abs(math.log(shape[1].num_layers / shape[1].hidden_size * 128 / depth)))


def vocabulary_for(num_parameters: int, most: int, padded: Callable[[int], int]) -> int:
    """Return the largest vocabulary, of at most `most` tokens, that leaves two thirds of a Llama to its layers.

    padded: (tokens) -> rows of the model.
    """
    for size in (most, *(each for each in VOCABULARIES if each < most)):
        try:
            model = llama_shape(num_parameters, padded(size), "")[1]
        except ConfigError:
            continue
        matrices = 1 if model.tie_word_embeddings else 2
        if matrices * model.vocab_size * model.hidden_size <= _LARGEST_VOCABULARY * model.num_parameters():
            return size
    return most


def _with_layers(width: int, heads: int, num_parameters: int, vocab_size: int) -> tuple[str, ModelConfig]:
    """Return overrides and model of this width, with the number of layers that comes nearest to the size."""
    base = load_model_config(LLAMA)
    sizes = {"vocab_size": vocab_size, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads,
             "intermediate_size": base.intermediate_size * width // base.hidden_size // 32 * 32}
    if num_parameters < _LARGE:
        sizes["tie_word_embeddings"] = True

    def model(layers: int) -> tuple[str, ModelConfig]:
        values = {**sizes, "num_hidden_layers": layers}
        overrides = ",".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        return overrides, load_model_config(LLAMA, overrides)

    one, two = model(1)[1].num_parameters(), model(2)[1].num_parameters()
    return model(min(_MOST_LAYERS, max(_FEWEST_LAYERS, round((num_parameters - one) / (two - one)) + 1)))


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
# the peak rate, which are the defaults here. Pythia has a batch of 2M tokens for all its sizes; the first row has
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
