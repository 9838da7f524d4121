"""pretrain.memory's closed forms against the papers, torch's autograd, transformers' and DeepSpeed's own code.

Against real engines of every layout: tests/distributed/memory/test_measure.py.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import utils as ds_utils

from pretrain.config.layout import Layout
from pretrain.config.lenient import lenient_layout
from pretrain.errors import ConfigError
from pretrain.memory.estimate.activations import (
    ATTENTION_ROWS,
    CPU_ELEMENTS,
    LOSS_TOKENS,
    Pass,
    block_backward,
    block_kept,
    loss_backward,
    loss_kept,
    loss_peak,
)
from pretrain.memory.estimate.model_shape import read_shape, shape_of
from pretrain.memory.estimate.other_architectures import ARCHITECTURES
from pretrain.memory.estimate.phases import groups_of_layers
from pretrain.memory.estimate.pipeline_stages import (
    layer_work,
    partition_balanced,
    partition_uniform,
    pipeline_stage_layers,
)
from pretrain.memory.estimate.rank_memory import estimate_memory, estimate_rank
from pretrain.memory.footprint import Footprint
from pretrain.memory.measure.storage_tracker import StorageTracker
from pretrain.model.config import load_model_config, model_config_from, preset_names
from pretrain.model.flops import flops_per_token
from pretrain.model.kernels import cpu_attention, fused_loss
from pretrain.model.layers import Block
from pretrain.model.loss import linear_cross_entropy
from pretrain.model.rope import Rope
from pretrain.model.specs import as_module
from tests.support.effort import CountCalls
from tests.support.model_shapes import SHAPES, write_config

# ZeRO (arXiv 1910.02054), table 1: gigabytes a device by data-parallel ranks, of 7.5B, 128B and 1T parameters at stages
# 1, 2 and 3, as printed: whole numbers are cut off there, the others rounded.
PAPER = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
DROPOUT = {"gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
           "neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1}, "llama": {"attention_dropout": 0.1}}


def as_printed(gigabytes: float, printed: str) -> str:
    if "." not in printed:
        return str(int(gigabytes + 1e-9))
    digits = len(printed.split(".")[1])
    return f"{gigabytes + 1e-9:.{digits}f}"


@pytest.mark.parametrize("ranks", PAPER)
def test_the_zero_papers_table(ranks: int) -> None:
    for parameters, row in zip((7.5e9, 128e9, 1e12), PAPER[ranks], strict=True):
        for stage, printed in zip((1, 2, 3), row.split(), strict=True):
            found = estimate_memory(None, Layout(world_size=ranks, zero_stage=stage), num_parameters=parameters)
            assert as_printed(found.device_bytes / 1e9, printed) == printed, (ranks, parameters, stage)
    assert estimate_memory(None, Layout(world_size=ranks), num_parameters=7.5e9).device_bytes == 120e9


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the estimate counts, and as most ranks have it on CPUs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def saved_bytes(function: Any, parameters: list[torch.Tensor], *inputs: Any) -> int:
    """Bytes that autograd keeps while `function` runs, each storage once, parameters and rotary tables left out."""
    left_out, found = {tensor.untyped_storage()._cdata for tensor in parameters}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out:
            found[storage._cdata] = storage  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_keep_what_autograd_keeps(name: str, dropout: bool, dtype: torch.dtype) -> None:
    config = model_config_from({**SHAPES[name], **(DROPOUT[name.split("_")[0]] if dropout else {})}, "test")
    for batch, length in ((2, 32), (3, 40)):
        rope = Rope(config) if config.position == "rope" else None
        block = Block(config, rope).to(dtype)
        x_BTD = torch.randn(batch, length, config.hidden_size, dtype=dtype, requires_grad=True)
        tables = list(rope.tables(length, x_BTD)) if rope else []
        one = Pass(batch * length, length, dtype.itemsize, cuda=False)
        assert block_kept(shape_of(config), one) == saved_bytes(block, [*block.parameters(), *tables], x_BTD)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "vocab_size"), [(256, 5000), (1500, 500), (3000, 3000)])
def test_the_loss_keeps_and_peaks(dtype: torch.dtype, tokens: int, vocab_size: int, one_thread: None) -> None:
    shape = replace(shape_of(model_config_from(SHAPES["gpt2"], "test")), vocab_size=vocab_size, hidden_size=384)
    x_BTD = torch.randn(2, tokens // 2, shape.hidden_size, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(vocab_size, shape.hidden_size, dtype=dtype, requires_grad=True)
    labels = (torch.zeros(2, tokens // 2, dtype=torch.long), torch.ones(2, tokens // 2))
    one = Pass(tokens, tokens // 2, dtype.itemsize, cuda=False)
    with StorageTracker() as tracker:
        for tensor in (x_BTD, weight_VD):
            tracker.add(tensor)
        before = tracker.live_bytes
        for tensor in labels:
            tracker.add(tensor)
        loss = linear_cross_entropy(x_BTD, weight_VD, labels)
        assert tracker.peak_bytes - before == pytest.approx(loss_peak(shape, one), rel=0.01)
        assert tracker.live_bytes - before == pytest.approx(loss_kept(shape, one), rel=0.01)
        tracker.reset_peak()
        loss.backward()
    backward = loss_kept(shape, one) + weight_VD.nbytes + loss_backward(shape, one)
    assert tracker.peak_bytes - before == pytest.approx(backward, rel=0.01)


def test_the_operators_work_in_chunks_of_the_sizes_that_are_counted() -> None:
    assert (LOSS_TOKENS, CPU_ELEMENTS, ATTENTION_ROWS) == (fused_loss._TOKENS, fused_loss._CPU_ELEMENTS,
                                                           cpu_attention._ROWS)
    assert cpu_attention._SCORES_PER_THREAD == CPU_ELEMENTS


@pytest.mark.parametrize("name", ["gpt2", "neox_parallel", "llama"])
@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_forward_pass_leaves_what_its_groups_keep(name: str, interval: int) -> None:
    config = model_config_from({**SHAPES[name], "vocab_size": 11}, "test")
    model = as_module(config, activation_checkpoint_interval=interval).to(torch.bfloat16)
    shape, one = shape_of(config), Pass(2 * 48, 48, 2, cuda=False)
    tokens_BT = torch.zeros(2, 48, dtype=torch.long)
    labels = (tokens_BT.clone(), torch.ones(tokens_BT.shape))
    with StorageTracker() as tracker:
        for tensor in model.parameters():
            tracker.add(tensor)
        with torch.no_grad():
            model(tokens_BT)  # the rotary tables are there from now on
        before = tracker.live_bytes
        for tensor in (tokens_BT, *labels):
            tracker.add(tensor)
        loss = model(tokens_BT, *labels)
        left = tracker.live_bytes - before
    assert loss.requires_grad
    groups = groups_of_layers(shape, shape.layers(), one, interval)
    assert left == pytest.approx(sum(kept for kept, _ in groups), rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(4, 64), (2, 512)])
def test_a_blocks_backward_pass_peaks(name: str, dtype: torch.dtype, dropout: bool, batch: int, length: int,
                                      one_thread: None) -> None:
    config = model_config_from({**SHAPES[name], **(DROPOUT[name.split("_")[0]] if dropout else {})}, "test")
    shape = shape_of(config)
    block = Block(config, Rope(config) if config.position == "rope" else None).to(dtype)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x_BTD = torch.randn(batch, length, config.hidden_size, dtype=dtype, requires_grad=True)
    one = Pass(batch * length, length, dtype.itemsize, cuda=False)
    with StorageTracker() as tracker:
        for tensor in (*block.parameters(), *(parameter.grad for parameter in block.parameters())):
            tracker.add(tensor)
        block(x_BTD.detach())  # the rotary tables are there from now on
        before = tracker.live_bytes
        y_BTD = block(x_BTD * 1)
        before += y_BTD.nbytes
        tracker.reset_peak()
        y_BTD.backward(torch.ones_like(y_BTD))
    expected = block_kept(shape, one) + block_backward(shape, one) + block.mlp.down.weight.nbytes
    assert tracker.peak_bytes - before == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_megatrons_formula(ranks: int) -> None:
    """arXiv 2205.05198, table 2 without sequence parallelism, and flash attention in place of its 5 a s / h term:
    s b h (10 + 24 / t), of which dropout masks are 2, less 8 / t for the output of GELU, which is computed anew; the
    extras here are norms' statistics and fp32 sums."""
    shape = replace(shape_of(model_config_from({"model_type": "gpt2", "n_layer": 2, "n_embd": 4096, "n_head": 32},
                                               "test")), attention_dropout=0.0)
    sbh = 2 * 2048 * 4096
    one = Pass(2 * 2048, 2048, 2, cuda=True, tensor_parallel_size=ranks)
    assert block_kept(shape, one) == pytest.approx(sbh * (10 + 16 / ranks), rel=0.01)


def test_stages_are_cut_as_deepspeed_cuts_them() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        items, parts = (int(torch.randint(1, 20, (), generator=generator)) for _ in range(2))
        weights = [[0, 1, 5, 5, 100][int(index)] for index in torch.randint(0, 5, (items,), generator=generator)]
        assert partition_balanced(tuple(weights), parts) == [int(cut) for cut in
                                                              ds_utils.partition_balanced(weights, parts)]
        assert partition_uniform(items, parts) == [int(cut) for cut in ds_utils.partition_uniform(items, parts)]


def test_stages_are_cut_by_work() -> None:
    """The default: of 8 blocks and a head that does the work of 2.3 of them the first stage takes 5."""
    for name in preset_names():
        config = load_model_config(name)
        shape = shape_of(config)
        assert 6 * sum(layer_work(shape, layer, 1024) for layer in shape.layers()) == flops_per_token(config, 1024)
    small = load_model_config("gpt2", "n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions=512")
    layout = Layout(pipeline_stages=2, world_size=2, seq_length=512)
    assert [sum(layer.kind == "block" for layer in pipeline_stage_layers(shape_of(small), layout, stage))
            for stage in range(2)] == [5, 3]


def test_every_stage_has_a_block_however_much_work_the_head_is() -> None:
    for vocab_size in (256, 50_000, 1_000_000):
        for layers in range(2, 14):
            shape = shape_of(load_model_config("tiny", f"vocab_size={vocab_size},n_layer={layers},n_embd=64"))
            for stages in range(2, layers + 1):
                layout = Layout(pipeline_stages=stages, world_size=stages, seq_length=128)
                blocks = [sum(layer.kind == "block" for layer in pipeline_stage_layers(shape, layout, stage))
                          for stage in range(stages)]
                assert min(blocks) >= 1, (vocab_size, layers, stages, blocks)
                assert max(blocks[:-1]) - min(blocks[:-1]) <= 1


def test_presets_have_the_parameters_of_their_models() -> None:
    for name in preset_names():
        config = load_model_config(name)
        shape = read_shape(name)
        assert shape == shape_of(config)
        assert shape.num_parameters() == config.num_parameters()


SMALL = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 96}
NO_HEAD = {"head_dim": None}  # left out: Falcon's follows from the rest
OTHERS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [{"num_local_experts": 4}], "qwen3_moe": [{"mlp_only_layers": [1], "num_experts": 4}],
    "qwen2_moe": [{"num_experts": 4, "decoder_sparse_step": 2, "head_dim": 16}, {"num_experts": 4, "head_dim": 16}],
    "qwen2": [{"head_dim": 16, "tie_word_embeddings": True}],
    "opt": [{"ffn_dim": 96, "word_embed_proj_dim": 64, "hidden_size": 64}], "phi": [{"head_dim": 16}],
    "stablelm": [{"head_dim": 16, "use_qkv_bias": True}], "starcoder2": [{"head_dim": 16}, {"use_bias": False,
                                                                                         "head_dim": 16}],
    "bloom": [{"n_layer": 2, "n_head": 4}], "gptj": [{"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}],
    "gpt_bigcode": [{"n_embd": 64, "n_layer": 2, "n_head": 4}, {"n_embd": 64, "n_head": 4, "multi_query": False}],
    "falcon": [{**NO_HEAD, **others} for others in (
        {}, {"new_decoder_architecture": True, "num_kv_heads": 2}, {"bias": True, "parallel_attn": False},
        {"alibi": True, "multi_query": False})],
    "phi3": [{"head_dim": 16, "pad_token_id": 0}], "olmo": [{"head_dim": 16}], "olmo2": [{"head_dim": 16}],
    "cohere": [{"head_dim": 16, "pad_token_id": 0}], "smollm3": [{"head_dim": 16, "pad_token_id": 0}],
    "granite": [{"head_dim": 16, "attention_bias": True}],
}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_other_architectures_have_transformers_parameter_counts(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for others in OTHERS.get(kind, [{}]):
        values = {key: value for key, value in {**SMALL, **others}.items() if value is not None}
        config = AutoConfig.for_model(kind, **values)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shape = read_shape(write_config(tmp_path, json.loads(config.to_json_string())))
        assert shape.num_parameters() == sum(weight.numel() for weight in model.parameters()), others
        assert "model_type" in shape.untrainable_reason


def test_a_key_that_is_not_trained_here_is_read_all_the_same(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, {**SHAPES["llama"], "sliding_window": 128}))
    assert "sliding_window" in shape.untrainable_reason
    assert replace(shape, untrainable_reason="") == shape_of(model_config_from(SHAPES["llama"], "test"))


def test_jsons_of_others() -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
              "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto",
                                    "sub_group_size": 1e9, "offload_optimizer": {"device": "cpu"}},
              "made_up": True, "zero_optimisation": {"stage": 1}}
    layout = lenient_layout(config, world_size=8, hidden_size=1024)
    assert (layout.zero_stage, layout.precision, layout.micro_batch_size) == (3, "bf16", 8)
    assert (layout.reduce_bucket_size, layout.prefetch_bucket_size) == (1024**2, int(0.9 * 1024**2))
    assert (layout.sub_group_size, layout.offload_optimizer, layout.overlap_comm) == (10**9, "cpu", True)
    assert any("zero_optimisation" in note for note in layout.notes)
    assert any("made_up" in note for note in layout.notes)


def test_every_offloaded_byte_has_its_place() -> None:
    shape, layout = read_shape("gpt2"), Layout(world_size=4, zero_stage=3)
    plain = estimate_memory(shape, layout).steady
    on_cpu = estimate_memory(shape, replace(layout, offload_optimizer="cpu", offload_optimizer_pinned=False)).steady
    on_disk = estimate_memory(shape, replace(layout, offload_optimizer="nvme", offload_param="nvme")).steady
    assert on_cpu.total("optimizer_states", "host") == plain.total("optimizer_states", "device")
    assert on_cpu.total(location="pinned") == 0
    assert on_disk.total("optimizer_states", "nvme") > 0.99 * plain.total("optimizer_states", "device")
    assert on_disk.total("optimizer_states", "device") == 0
    pinned = estimate_memory(shape, replace(layout, offload_optimizer="cpu")).peak
    assert 0 < pinned.total("margin", "pinned") < pinned.total(location="pinned") / 2  # each tensor less than doubled


def test_the_worst_rank_is_the_worst() -> None:
    shape = read_shape("gpt2")
    layout = Layout(world_size=8, zero_stage=1, pipeline_stages=4, gradient_accumulation_steps=8, seq_length=256)
    worst = estimate_memory(shape, layout)
    ranks = [estimate_rank(shape, layout, pipeline_stage=stage) for stage in range(4)]
    assert worst.device_bytes == max(rank.device_bytes for rank in ranks)
    assert sum(len(pipeline_stage_layers(shape, layout, stage)) for stage in range(4)) == len(shape.layers())
    zero_2 = replace(layout, zero_stage=2, pipeline_stages=1, device_kind="cpu")
    every = [estimate_rank(shape, zero_2, zero_rank=rank).steady.total() for rank in range(8)]
    assert estimate_memory(shape, zero_2).steady.total() == max(every)


def test_more_ranks_never_need_more() -> None:
    shape = read_shape("gpt3-1.3b")
    for stage in (1, 2, 3):
        sizes = [estimate_memory(shape, Layout(world_size=ranks, zero_stage=stage)).steady.states()
                 for ranks in (1, 8, 64)]
        assert sizes[0] > sizes[1] > sizes[2]


def test_experts_are_divided(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, {"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024,
                                               "num_hidden_layers": 4, "num_attention_heads": 16,
                                               "intermediate_size": 3584}))
    layout = Layout(world_size=8, zero_stage=1)
    whole = estimate_memory(shape, layout).steady.total("parameters")
    divided = estimate_memory(shape, replace(layout, expert_parallel_size=8)).steady.total("parameters")
    experts = 4 * 8 * 3 * 1024 * 3584 * 2
    assert whole - divided == pytest.approx(experts * 7 / 8, rel=1e-3)
    assert shape.active_parameters() == shape.num_parameters() - experts // 2 * 6 // 8


@pytest.mark.parametrize(("layout", "said"), [
    (Layout(world_size=6, pipeline_stages=4), "multiple of 4"), (Layout(world_size=0), "world_size"),
    (Layout(precision="int8"), "precision"), (Layout(world_size=8, expert_parallel_size=3), "divisor"),
    (Layout(world_size=64, pipeline_stages=64), "a layer for each"),
    (Layout(partition_method="profile", pipeline_stages=2, world_size=2), "partition_method"),
    (Layout(seq_length=4096), "seq_length"),
])
def test_impossible_layouts_are_refused_in_a_line(layout: Layout, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        estimate_memory(read_shape("gpt2"), layout)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    for values in ({"model_type": "t5"}, {"model_type": "mistral", "vocab_size": 100}, {}):
        with pytest.raises(ConfigError):
            read_shape(write_config(tmp_path, values))
    with pytest.raises(ConfigError):
        estimate_memory(None, Layout())


def test_footprints_add_and_travel() -> None:
    one = Footprint({("parameters", "device"): 5, ("gradients", "host"): 7})
    assert (one + one).total() == 24
    assert one.states("host") == 7
    assert Footprint.of_json(json.loads(json.dumps(one.to_json()))) == one
    with pytest.raises(ValueError, match="weights"):
        Footprint({("weights", "device"): 1})


def test_an_estimate_takes_little_work() -> None:
    shape = read_shape("gpt3-175b")
    for stage in range(4):
        for micro in (1, 25):
            layout = Layout(world_size=1024, zero_stage=stage, micro_batch_size=micro,
                            pipeline_stages=1 if stage > 1 else 8, gradient_accumulation_steps=16, seq_length=2048)
            with CountCalls() as work:
                estimate_memory(shape, layout)
            assert work.calls < 40_000, layout  # 14,000 at most when this was written: a few milliseconds
