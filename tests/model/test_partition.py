"""Division of layers into pipeline stages, compared with DeepSpeed's own functions and with all possible divisions."""

import itertools
import re
from itertools import pairwise

import pytest
import torch
from deepspeed.runtime import utils as ds_utils

from pretrain.errors import ConfigError
from pretrain.model.config import ModelConfig, load_model_config, preset_names
from pretrain.model.layer_specs import as_module, build_specs
from pretrain.model.partition import (
    layer_costs,
    partition_balanced,
    partition_by_time,
    partition_uniform,
    stage_bounds,
    stage_without_block,
)

LENGTH = 128


def small(**overrides: object) -> ModelConfig:
    settings = {"vocab_size": 256, "n_layer": 6, "n_embd": 64, **overrides}
    return load_model_config("tiny", ",".join(f"{key}={value}" for key, value in settings.items()))


def bounds(config: ModelConfig, stages: int, method: str, times: tuple[int, ...] = ()) -> list[int]:
    return stage_bounds(layer_costs(config, LENGTH), num_stages=stages, method=method, times=times)


def test_partitions_equal_those_of_deepspeed() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        items, parts = (int(torch.randint(1, 20, (), generator=generator)) for _ in range(2))
        weights = [[0, 1, 5, 5, 100][int(index)] for index in torch.randint(0, 5, (items,), generator=generator)]
        balanced = [int(cut) for cut in ds_utils.partition_balanced(weights, parts)]
        assert partition_balanced(tuple(weights), parts) == balanced
        assert partition_uniform(items, parts) == [int(cut) for cut in ds_utils.partition_uniform(items, parts)]


def test_costs_are_those_of_the_layers() -> None:
    """Class name and number of parameters of each layer that the engine builds; a tied matrix counts on both ends."""
    for name in preset_names():
        config, costs = load_model_config(name), layer_costs(load_model_config(name), 64)
        specs = build_specs(config, ends_in_loss=True)
        assert [cost.class_name for cost in costs] == [spec.typename.__name__ for spec in specs], name
        with torch.device("meta"):
            sizes = [sum(parameter.numel() for parameter in spec.build().parameters()) for spec in specs]
            total = sum(parameter.numel() for parameter in as_module(config).parameters())
        assert [cost.parameters for cost in costs] == sizes, name
        assert sum(sizes) - (costs[-1].parameters if config.tie_word_embeddings else 0) == total, name


@pytest.mark.parametrize("tied", ["true", "false"])
def test_embedding_and_head_count_as_layers(tied: str) -> None:
    """A vocabulary of 6000 x 64 is as large as 8 of the 12 blocks. "flops" counts it in the head, where its products
    are; "parameters" counts it on both ends, tied or not; "uniform" ignores it."""
    config = small(vocab_size=6000, n_layer=12, tie_word_embeddings=tied)
    head = len(layer_costs(config, LENGTH)) - 1

    def blocks(method: str) -> list[int]:
        return [sum(2 <= layer < 14 for layer in range(*cut)) for cut in pairwise(bounds(config, 3, method))]

    assert bounds(config, 3, "flops")[-1] - 1 == head
    assert blocks("flops") == [6, 5, 1]
    assert blocks("parameters") == [1, 9, 2]  # the first stage has the position table too
    assert blocks("uniform") == [4, 5, 3]


def test_time_is_the_best_division_with_a_block_on_each_stage() -> None:
    """Compared with all divisions, for random times in which embedding and head may be longer than all blocks."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        parts = int(torch.randint(2, 5, (), generator=generator))
        blocks = parts + int(torch.randint(0, 4, (), generator=generator))
        is_block = (False, False, *[True] * blocks, False, False)
        times = tuple(int(t) for t in torch.randint(1, 50, (len(is_block),), generator=generator))

        def slowest(cuts: tuple[int, ...], times: tuple[int, ...] = times) -> int:
            return max(sum(times[start:end]) for start, end in pairwise(cuts))

        legal = [(0, *cuts, len(times)) for cuts in itertools.combinations(range(1, len(times)), parts - 1)
                 if all(any(is_block[start:end]) for start, end in pairwise((0, *cuts, len(times))))]
        found = partition_by_time(times, is_block, parts)
        assert tuple(found) in legal
        assert slowest(tuple(found)) == min(map(slowest, legal))


def test_time_without_times_uses_flops_and_leaves_each_stage_a_block() -> None:
    for vocab_size in (256, 1_000_000):
        config = small(vocab_size=vocab_size)
        for stages in range(2, 7):
            assert stage_without_block(layer_costs(config, LENGTH), bounds(config, stages, "time")) is None


@pytest.mark.parametrize(("pattern", "matching"), [
    ("block", 6), ("BLOCK|FinalNorm", 7), ("(?:Block|Head)", 7), (r"^T\w+", 1), ("Block$|LossHead|TokenEmbedding", 8)])
def test_any_regular_expression_divides_the_matching_layers(pattern: str, matching: int) -> None:
    """DeepSpeed converts the expression to lower case (which inverts \\W) and cuts it at the next colon; this does
    neither."""
    config = small(tie_word_embeddings="false")
    names = [layer.class_name for layer in layer_costs(config, LENGTH)]
    assert names == ["TokenEmbedding", "PositionEmbedding", *["Block"] * 6, "FinalNorm", "LossHead"]
    hits = [bool(re.search(pattern, name, re.IGNORECASE)) for name in names]
    assert sum(hits) == matching
    own = [sum(hits[start:end]) for start, end in pairwise(bounds(config, 2, f"type:{pattern}"))]
    assert max(own) - min(own) <= 1


def test_a_stage_without_a_block_is_found() -> None:
    config = small(vocab_size=60000)
    layers = layer_costs(config, LENGTH)
    assert stage_without_block(layers, bounds(config, 3, "parameters")) == 0
    assert stage_without_block(layers, bounds(config, 3, "flops")) is None
    with pytest.raises(ConfigError, match="at least one layer"):
        bounds(config, 11, "uniform")
