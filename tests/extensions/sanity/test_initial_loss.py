"""Bounds of the loss at initialization, compared with the loss of a model with initial weights."""

from types import SimpleNamespace
from typing import Any

import torch

from pretrain.config.flags.arguments import RunArguments
from pretrain.extensions.sanity.forward_checks import loss_bounds
from pretrain.model.config import load_model_config
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import as_module


def test_repeated_tokens_lower_the_loss_of_tied_embeddings() -> None:
    """With tied embeddings, an untrained model gives a higher probability to the token that it reads."""
    config = load_model_config("tiny")
    assert config.tie_word_embeddings
    module = as_module(config).eval()
    initialize_parameters(module, config, seed=1)
    plan: Any = SimpleNamespace(model=config, args=RunArguments(), origin=None)
    tokens_BT = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(1))
    weights_BT = torch.full(tokens_BT.shape, 1 / tokens_BT.numel())
    with torch.no_grad():
        repeated, other = (float(module(tokens_BT, labels_BT, weights_BT)) for labels_BT in
                           (tokens_BT, tokens_BT.roll(1, 0)))
    lowest, lowest_repeated = loss_bounds(plan)[0], loss_bounds(plan, repeated=1.0)[0]
    assert lowest_repeated <= repeated < lowest <= other
