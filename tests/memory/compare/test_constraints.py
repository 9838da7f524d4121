"""The search over layouts and train.py's rules agree: what is proposed is accepted, and what is rejected is not."""

from collections import Counter
from dataclasses import replace

import pytest

from pretrain.config.ds_json.read import DsFile
from pretrain.config.layout import Layout
from pretrain.errors import ConfigError
from pretrain.memory.compare.candidates import generate_candidates, make_config, resolve_candidate
from pretrain.memory.compare.combinations import Axes, combinations_of, default_axes, impossible_reason
from pretrain.memory.hardware import make_cluster
from pretrain.model.config import ModelConfig, load_model_config, model_config_from
from tests.config.test_resolve import MIXTURE

CLUSTER = make_cluster(gpu="a100-80", world_size=8, nodes=None, gpus_per_node=None)
GROUPED = {"model_type": "llama", "vocab_size": 320, "hidden_size": 96, "intermediate_size": 192,
           "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 512,
           "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
MODELS = {"tied": load_model_config("tiny"), "grouped": model_config_from(GROUPED, "config.json"),
          "experts": MIXTURE}
IGNORED = "parameter offload needs ZeRO stage 3"  # train.py leaves the block out, with a note
GRID = Axes(offloads=("none", "optimizer_cpu", "all_cpu", "optimizer_nvme"), pipeline_stages=(1, 2, 8),
            tensor_parallel_sizes=(1, 2, 3, 8), sequence_parallel_sizes=(1, 4), expert_parallel_sizes=(1, 2),
            precisions=("bf16",), grad_accum_dtypes=("", "fp32"), activation_checkpoint_intervals=(0,),
            recomputes=("none",), seq_lengths=(64, 63))


def _rejection(layout: Layout, model: ModelConfig) -> str:
    """Return why train.py rejects the layout, or ""."""
    config = make_config(replace(layout, gradient_accumulation_steps=4), CLUSTER, model)
    config["train_batch_size"] = 4 * max(1, layout.data_parallel_size)
    try:
        return resolve_candidate(DsFile("grid", config), layout, CLUSTER, model).rejection
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", MODELS)
def test_the_constraints_are_the_rules(name: str) -> None:
    model, seen = MODELS[name], Counter[str]()
    for layout in combinations_of(GRID, CLUSTER.world_size):
        reason, rejection = impossible_reason(layout, CLUSTER, model), _rejection(layout, model)
        if reason == IGNORED:
            continue
        assert bool(reason) == bool(rejection), f"{layout}: search: {reason or 'possible'}; rules: {rejection or 'ok'}"
        seen[reason] += 1
    assert seen[""] >= 20
    assert len(seen) >= 10


@pytest.mark.parametrize(("name", "gpu", "world_size", "seq_length"), [
    ("gpt3-175b", "h100", 64, 2048), ("llama3-70b", "a100-80", 64, 4096), ("llama3-8b", "a100-40", 32, 131_072)])
def test_proposed_degrees_pass_the_check_of_train(name: str, gpu: str, world_size: int, seq_length: int) -> None:
    model = load_model_config(name, "max_position_embeddings=131072" if seq_length == 131_072 else None)
    cluster = make_cluster(gpu=gpu, world_size=world_size, nodes=None, gpus_per_node=None)
    found = generate_candidates(Axes(seq_lengths=(seq_length,)), cluster, model).candidates
    divided = {candidate.name: candidate for candidate in found if candidate.layout.micro_batch_size == 1
               and max(candidate.layout.tensor_parallel_size, candidate.layout.sequence_parallel_size) > 1}
    assert len(divided) >= 8
    assert {candidate.layout.tensor_parallel_size for candidate in divided.values()} >= (
        {2, 4, 8} if seq_length < 131_072 else set())
    assert {candidate.rejection for candidate in divided.values()} == {""}


def test_degrees_are_proposed_only_where_they_are_needed() -> None:
    cluster = make_cluster(gpu="a100-80", world_size=16, nodes=None, gpus_per_node=None)
    small = default_axes(Axes(), cluster, load_model_config("gpt3-1.3b"))
    assert small.tensor_parallel_sizes == small.sequence_parallel_sizes == small.expert_parallel_sizes == (1,)
    large = default_axes(Axes(), cluster, load_model_config("llama3-70b"))
    assert large.tensor_parallel_sizes == (1, 2, 4, 8)
    given = default_axes(Axes(tensor_parallel_sizes=(4,)), cluster, load_model_config("llama3-70b"))
    assert given.tensor_parallel_sizes == (4,)
    few = replace(cluster, gpus_per_node=2, nodes=8)
    assert default_axes(Axes(), few, load_model_config("llama3-70b")).tensor_parallel_sizes == (1, 2)
