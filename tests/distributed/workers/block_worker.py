"""Two tensor-parallel ranks compute complete models of every family, and compare them with one rank's.

Every rank also builds the model of one rank, so that outputs and gradients are compared on the ranks. A mismatch fails
the rank. main() lists the checks.
"""

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pretrain.distributed.parallel_groups import NO_GROUPS, ParallelGroups, RankOrder, create_group
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.description import inside
from pretrain.model.init import initialize_parameters
from pretrain.model.kernels.norm import NORM
from pretrain.model.kernels.vocabulary_shards import VocabularyShard
from pretrain.model.layer_specs import CausalLM, as_module
from pretrain.model.layers.attention import Attention
from pretrain.model.layers.block import Block
from pretrain.model.parallel import shared_tensors
from pretrain.model.parallel.shared_tensors import own_shard
from pretrain.model.parameters import part_of
from pretrain.model.recompute import Recompute
from tests.support.model_shapes import SHAPES
from tests.support.operators import by_torch

ROWS, TOKENS, SEED = 3, 20, 3
RECOMPUTED = (Recompute("attention"), Recompute("mlp"), Recompute("blocks"), Recompute(interval=2))


def _config(shape: str) -> ModelConfig:
    """Return the config of a shape without dropout, with key/value heads that two ranks can share."""
    config = model_config_from(SHAPES[shape], shape)
    even = replace(config, embedding_dropout=0.0, attention_dropout=0.0, residual_dropout=0.0)
    heads = config.num_heads + config.num_heads % 2
    kv_heads = heads if config.num_kv_heads == config.num_heads else max(2, config.num_kv_heads)
    return replace(even, num_heads=heads, num_kv_heads=kv_heads,
                   num_experts=config.num_experts + config.num_experts % 2)


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


def _batch(config: ModelConfig, *, with_documents: bool, rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    """Return tokens, labels, weights of which one sample has few, and the positions in documents if there are any."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, config.vocab_size, (2, rows, TOKENS), generator=generator)
    weights = torch.rand(rows, TOKENS, generator=generator)
    weights[0, 3:] = 0.0
    if not with_documents:
        return tokens, labels, weights
    positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)]) for cut in (7, 10, 15)])
    return tokens, labels, weights, positions


def _compare(config: ModelConfig, groups: ParallelGroups, *, dtype: torch.dtype = torch.float64,
             with_documents: bool = False, rows: int = ROWS, **settings: Any) -> None:
    """Compare logits, loss, gradients and initial values with one rank's. Gemma's norms and routers are in fp32."""
    wide = 1e-6 if config.norm_offset or config.num_experts else 1e-11
    rounding = {torch.float64: wide, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    model, complete_model = (_model(config, ranks, dtype, **settings) for ranks in (groups, NO_GROUPS))
    batch = _batch(config, with_documents=with_documents, rows=rows)
    loss, expected = model(*batch), complete_model(*batch)
    torch.testing.assert_close(loss, expected, rtol=min(rounding, 5e-4), atol=0)
    (loss + expected).backward()
    _compare_parameters(model, complete_model, rounding)
    if dtype == torch.float64:
        words = slice(*VocabularyShard(groups.tensor, config.vocab_size).words)
        torch.testing.assert_close(model(batch[0]), complete_model(batch[0])[..., words], rtol=rounding, atol=rounding)


def _compare_parameters(model: CausalLM, complete_model: CausalLM, rounding: float) -> None:
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
        if own.dtype == torch.float64:  # otherwise rounding errors exceed some gradients, which are nearly 0
            assert difference.abs().max() <= rounding * complete.grad.abs().max(), name
    assert squares[1].sqrt() <= rounding * squares[0].sqrt()


def compare_with_one_rank(groups: ParallelGroups) -> None:
    """Compare every family, and the variants of the layers."""
    for shape in SHAPES:
        _compare(_config(shape), groups)
    for shape in ("gpt2", "bloom", "gemma2", "qwen3"):
        _compare(_config(shape), groups, with_documents=True)
        _compare(_config(shape), groups, rows=1)  # one sample needs no copies to be gathered and scattered
    for shape in ("gpt2", "mpt", "phi", "olmo2", "gemma3"):
        _compare(_config(shape), groups, dtype=torch.bfloat16)
    for shape in ("gemma2", "phi", "olmo2"):
        _compare(_config(shape), groups, plain_operators=True)
        _compare(_config(shape), groups, dtype=torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        _compare(replace(_config("llama"), intermediate_size=57), groups, dtype=dtype)
    for recompute in RECOMPUTED:
        for shape in ("llama", "phi", "qwen2_moe"):  # phi: attention and MLP have the same input
            _compare(_config(shape), groups, recompute=recompute, with_documents=True)


def _masks_of_residual_dropout(config: ModelConfig, groups: ParallelGroups) -> list[torch.Tensor]:
    """Return which elements each dropout of the model kept on this rank."""
    model, masks = _model(config, groups, torch.float64), []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _module, _inputs, output: masks.append(output.detach() != 0))
    model(*_batch(config, with_documents=False))
    return masks


def _masks_of_attention_dropout(config: ModelConfig, groups: ParallelGroups) -> torch.Tensor:
    """Return [B, heads of this rank, T, T]: which probabilities a layer's dropout kept.

    All scores are 0, and the value at position s is the s-th unit vector, so that the output is the probabilities.
    """
    size = config.head_size
    layer = Attention(config, inside(config.blocks()[0].by_name(), "attention"), None, groups=groups).double()
    heads = layer.num_heads
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.qkv.weight[2 * heads * size :] = torch.eye(size, config.hidden_size, dtype=torch.float64).repeat(heads, 1)
    probabilities = []
    layer.out.register_forward_pre_hook(lambda _module, inputs: probabilities.append(inputs[0].detach()))
    x_BTD = torch.eye(size, config.hidden_size, dtype=torch.float64).expand(ROWS, -1, -1)
    layer(own_shard(x_BTD, groups.tensor))
    return probabilities[0].unflatten(2, (heads, size)).transpose(1, 2) != 0


def masks_of_dropout(groups: ParallelGroups) -> None:
    """All masks of the two ranks, and of the heads of a rank, are different draws with the right rate."""
    drop = 0.25
    config = replace(_config("neox_sequential"), embedding_dropout=drop, residual_dropout=drop, attention_dropout=drop)
    torch.manual_seed(SEED + 1 + groups.tensor.rank)  # as in engine/build.py
    attention_BHTT = _masks_of_attention_dropout(config, groups)
    seen = torch.ones(attention_BHTT.shape[2:], dtype=torch.bool).tril()
    assert not attention_BHTT[..., ~seen].any()
    masks = [*attention_BHTT[..., seen].unbind(1), *_masks_of_residual_dropout(config, groups)]
    assert len(masks) == config.num_heads // 2 + 1 + 2 * config.num_layers
    for mask in masks:
        both = [mask.flatten().clone(), mask.flatten().clone()]
        dist.all_gather(both, mask.flatten())
        _check_independence(torch.stack(both), drop)
    _check_independence(torch.stack([mask.flatten() for mask in masks[: config.num_heads // 2]]), drop)


def _check_independence(masks: torch.Tensor, drop: float) -> None:
    """Check the rates of two masks, and of their agreement, to 5 standard deviations."""
    same = drop**2 + (1 - drop) ** 2
    for values, rate in ((masks, 1 - drop), (masks[0] == masks[1], same)):
        deviation = (rate * (1 - rate) / values.numel()) ** 0.5
        assert abs(values.double().mean() - rate) < 5 * deviation


def recomputed_masks(groups: ParallelGroups) -> None:
    """Recomputation repeats the masks of dropout: loss and gradients stay the same."""
    for shape in ("neox_sequential", "phi"):
        config = replace(_config(shape), embedding_dropout=0.1, residual_dropout=0.2, attention_dropout=0.3)
        results = []
        for recompute in (Recompute(), *RECOMPUTED):
            model = _model(config, groups, torch.float64, recompute=recompute)
            torch.manual_seed(SEED + 1 + groups.tensor.rank)
            loss = model(*_batch(config, with_documents=False))
            loss.backward()
            results.append((loss, *(parameter.grad for parameter in model.parameters())))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-12)


def _traffic(config: ModelConfig, groups: ParallelGroups, recompute: str) -> tuple[list[int], int]:
    """Return the gathers and sums of a block's forward and backward pass, and the number of saved elements."""
    block, saved = Block(config, config.blocks()[0], None, groups=groups, recompute=recompute), {}
    for parameter in block.parameters():
        parameter.data.fill_(0.1)
    weights = {parameter.data_ptr() for parameter in block.parameters()}
    x_BTD = torch.rand(ROWS, TOKENS // groups.tensor.size, config.hidden_size, requires_grad=True)

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor
    gathers = mock.Mock(side_effect=shared_tensors._all_gather)
    sums = mock.Mock(side_effect=shared_tensors._reduce_scatter)
    with mock.patch.multiple(shared_tensors, _all_gather=gathers, _reduce_scatter=sums):
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out_BTD = block(x_BTD)
        counts = [gathers.call_count, sums.call_count]
        out_BTD.sum().backward()
    return [*counts, gathers.call_count - counts[0], sums.call_count - counts[1]], sum(saved.values())


def gathers_and_saved_tensors(groups: ParallelGroups) -> None:
    """A block gathers each input once a pass, and each of two ranks saves half of what one rank saves.

    The gathers of the backward pass are for the inputs, recomputed or not, and the outputs' gradients. Norms are
    torch's: those in C are recomputed on one rank, and saved on two.
    """
    with by_torch(NORM):
        gpt2, llama, phi = (replace(_config(shape), position="alibi") for shape in ("gpt2", "llama", "phi"))
        for config, expected in ((gpt2, [2, 2, 4, 2]), (llama, [2, 2, 4, 2]), (phi, [1, 2, 3, 1])):
            for recompute in ("none", "attention", "mlp"):
                counts, size = _traffic(config, groups, recompute)
                assert counts == expected or (config is phi and recompute != "none"), (recompute, counts)
                _, complete_size = _traffic(config, NO_GROUPS, recompute)
                assert 0.49 < size / complete_size < 0.53, (config.architecture, recompute, size, complete_size)


def main() -> None:
    dist.init_process_group("gloo")
    both = create_group(RankOrder(tensor=2).groups_along("tensor"))
    groups = ParallelGroups(tensor=both, expert=both)
    for check in (compare_with_one_rank, masks_of_dropout, recomputed_masks, gathers_and_saved_tensors):
        check(groups)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
