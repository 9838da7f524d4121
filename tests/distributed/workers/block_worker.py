"""Two tensor-parallel ranks compute complete models of every family, and compare them with one rank's.

Every rank also builds the model of one rank, so that outputs and gradients are compared on the ranks. A mismatch fails
the rank. main() lists the checks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankOrder, create_group
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.init import initialize_parameters
from pretrain.model.layer_specs import CausalLM, as_module
from pretrain.model.parts import part_of
from tests.support.model_shapes import SHAPES

ROWS, TOKENS, SEED = 3, 20, 3


def _config(shape: str) -> ModelConfig:
    """Return the config of a shape without dropout, with key/value heads that two ranks can share."""
    config = model_config_from(SHAPES[shape], shape)
    even = replace(config, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
    heads = config.num_heads + config.num_heads % 2
    kv_heads = heads if config.num_kv_heads == config.num_heads else max(2, config.num_kv_heads)
    return replace(even, num_heads=heads, num_kv_heads=kv_heads)


def _model(config: ModelConfig, groups: ParallelGroups, dtype: torch.dtype, **settings: Any) -> CausalLM:
    model = as_module(config, groups=groups, **settings)
    initialize_parameters(model, config, seed=SEED)
    with torch.no_grad():  # biases and norms start with equal values, which would hide a permutation
        for name, parameter in model.named_parameters():
            part = part_of(parameter)
            if len(parameter.shape) == 1:
                shape = parameter.shape if part is None else part.shape
                noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
                parameter += noise if part is None else part.of(noise)
    return model.to(dtype)


def _batch(config: ModelConfig, *, with_documents: bool) -> tuple[torch.Tensor, ...]:
    """Return tokens, labels, weights of which one sample has few, and the positions in documents if there are any."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, config.vocab_size, (2, ROWS, TOKENS), generator=generator)
    weights = torch.rand(ROWS, TOKENS, generator=generator)
    weights[0, 3:] = 0.0
    if not with_documents:
        return tokens, labels, weights
    positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]) for cut in (7, 10, 15)])
    return tokens, labels, weights, positions


def _results(config: ModelConfig, groups: ParallelGroups, dtype: torch.dtype, with_documents: bool,
             settings: dict[str, Any]) -> tuple[torch.Tensor, CausalLM]:
    """Return the loss, and the model with its gradients."""
    model = _model(config, groups, dtype, **settings)
    loss = model(*_batch(config, with_documents=with_documents))
    loss.backward()
    return loss, model


def _compare(config: ModelConfig, groups: ParallelGroups, *, dtype: torch.dtype = torch.float64,
             with_documents: bool = False, **settings: Any) -> None:
    """Compare loss, gradients and initial values with those of one rank. Gemma's norms are computed in fp32."""
    rounding = {torch.float64: 1e-6 if config.norm_offset else 1e-11, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    loss, model = _results(config, groups, dtype, with_documents, settings)
    expected, complete_model = _results(config, NO_GROUPS, dtype, with_documents, settings)
    torch.testing.assert_close(loss, expected, rtol=min(rounding, 5e-4), atol=0)
    squares = torch.zeros(2, dtype=torch.float64)  # of all gradients, and of their differences
    for (name, complete), (same, own) in zip(complete_model.named_parameters(), model.named_parameters(), strict=True):
        assert name == same
        part = part_of(own)
        assert part is None or (part.local_shape == own.shape and part.shape == complete.shape), name
        of = (lambda x: x) if part is None else part.of
        assert torch.equal(own, of(complete)), name
        assert complete.grad is not None
        assert own.grad is not None
        difference = own.grad.double() - of(complete.grad).double()
        squares += torch.stack([complete.grad.double().square().sum(), difference.square().sum()])
        if dtype == torch.float64:  # otherwise rounding errors exceed some gradients, which are nearly 0
            assert difference.abs().max() <= rounding * complete.grad.abs().max(), f"{config.architecture}: {name}"
    assert squares[1].sqrt() <= rounding * squares[0].sqrt(), config.architecture


def main() -> None:
    dist.init_process_group("gloo")
    groups = ParallelGroups(tensor=create_group(RankOrder(tensor=2).groups_along("tensor")))
    for shape in SHAPES:
        _compare(_config(shape), groups)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
