"""Reading of a DeepSpeed JSON, and values for "auto"."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.auto_values import set_value
from pretrain.config.ds_json.read import read_ds_config
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import Device
from pretrain.engine.parallelism import engine_config
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config, model_config_from

CONFIGS = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)
ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
MIXTURE = model_config_from({
    "model_type": "mixtral", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64}, "config.json")
ARGS = RunArguments(model="tiny", save="run", train_steps=100, seq_length=64)


def write(folder: Path, values: Any) -> str:
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


def resolve(folder: Path, values: dict[str, Any], *, world_size: int = 1, device: Device = CUDA,
            **flags: Any) -> Plan:
    values = {"train_micro_batch_size_per_gpu": "auto", "optimizer": ADAMW, **values}
    resolved = resolve_ds_config(read_ds_config(write(folder, values)), dataclasses.replace(ARGS, **flags),
                                 model=load_model_config("tiny"), world_size=world_size, device=device)
    check_rules(resolved)
    return resolved


# --- reading ---

def test_comments_and_trailing_commas_are_read(tmp_path: Path) -> None:
    text = """// first
    { "a": [1, 2.5e3, -1,], # second
      /* third
         "a": 2, */
      "url": "http://x/#y", "deep": {"on": true, "off": false, "none": null,},
    } // last"""
    file = read_ds_config(write(tmp_path, text))
    assert file.values == {"a": [1, 2500.0, -1], "url": "http://x/#y",
                           "deep": {"on": True, "off": False, "none": None}}
    assert file.where("deep.on").endswith("ds.json:5: deep.on")
    assert file.where("deep.missing").endswith("ds.json:5: deep.missing")


def test_reading_agrees_with_deepspeed(tmp_path: Path) -> None:
    import hjson
    for path in CONFIGS:
        assert read_ds_config(str(path)).values == json.loads(json.dumps(hjson.loads(path.read_text())))


@pytest.mark.parametrize(("text", "culprit"), [
    ('{"a": 1,\n "b": 2,\n "a": 3}', "ds.json:3: a: the same key is on line 1"),
    ('{"a": {"b": 1,\n "b": 2}}', "ds.json:2: a.b"),
    ('{"a": 1\n "b": 2}', "ds.json:2: found '\"b\": 2}'; expected \",\""),
    ('{"a": tru}', "ds.json:1"),
    ('{"a": 1', "the end of the line or file"),
    ('{"a": 1} {', "after the closing brace"),
    ('{"a": "b\n"}', "ds.json:1"),
    ('{"a": 01x}', "ds.json:1"),
    ("[1]", "expected an object"),
    ("", "expected an object"),
    ("{\"a\": " + "[" * 100, "levels"),
    ("/* {}", "ds.json:1"),
    ('{"a": 1e999}', "a finite number"),
    ('{"a": -9223372036854775808}', "64 bits"),
    ('{"a": ' + "1" * 5000 + "}", "64 bits"),
    ('{"a": 01}', "ds.json:1"),
    ('{"a": "\\u0000"}', "printable"),
    ('{"\\ud800": 1}', "printable"),
    ('{"a": [{"b": {"c": 1, "c": 2}}]}', "the same key is on line"),
    ('{"train_batch_size": CONFIG_BATCH_SIZE}', "found 'CONFIG_BATCH_SIZE}'"),
])
def test_broken_files_are_rejected_with_the_line(tmp_path: Path, text: str, culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        read_ds_config(write(tmp_path, text))


# --- filling ---

AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


@pytest.mark.parametrize(("values", "flags", "world_size", "expected"), [
    (AUTO, {}, 1, (1, 1, 1)),
    (AUTO, {}, 4, (1, 1, 4)),
    (AUTO, {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, 4, (2, 3, 24)),
    (AUTO, {"micro_batch_size": 2, "global_batch_size": 24}, 4, (2, 3, 24)),
    (AUTO, {"gradient_accumulation_steps": 3, "global_batch_size": 24}, 4, (2, 3, 24)),
    (AUTO, {"global_batch_size": 24}, 4, (6, 1, 24)),
    (AUTO, {"gradient_accumulation_steps": 3}, 2, (1, 3, 6)),
    ({"train_batch_size": 24}, {}, 4, (6, 1, 24)),
    ({"train_micro_batch_size_per_gpu": 2}, {}, 4, (2, 1, 8)),
    ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, {}, 4, (3, 2, 24)),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, {}, 4, (2, 3, 24)),
    (dict(zip(AUTO, (24, 2, 3), strict=True)), {}, 4, (2, 3, 24)),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps": 3}, 4, (2, 3, 24)),
    ({**AUTO, "pipeline": {"stages": 2}}, {"global_batch_size": 24, "micro_batch_size": 3}, 4, (3, 4, 24)),
])
def test_missing_batch_sizes_are_computed(tmp_path: Path, values: dict, flags: dict, world_size: int,
                                          expected: tuple) -> None:
    base = {} if "train_micro_batch_size_per_gpu" in values or "train_batch_size" not in values else \
        {"train_micro_batch_size_per_gpu": None}
    document = {key: value for key, value in {"optimizer": ADAMW, **base, **values}.items() if value is not None}
    resolved = resolve_ds_config(read_ds_config(write(tmp_path, document)), dataclasses.replace(ARGS, **flags),
                                 model=load_model_config("tiny"), world_size=world_size, device=CUDA)
    layout = resolved.layout
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.global_batch_size) == expected
    assert resolved.get("train_batch_size") == expected[2]


def test_auto_values_of_the_optimizer_come_from_flags_or_defaults(tmp_path: Path) -> None:
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    resolved = resolve(tmp_path, {"optimizer": auto, "gradient_clipping": "auto"})
    assert resolved.get("optimizer.params") == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert resolved.get("gradient_clipping") == 1.0
    resolved = resolve(tmp_path, {"optimizer": auto, "gradient_clipping": "auto"}, learning_rate=1e-3, adam_beta2=0.99,
                        adam_epsilon=1e-6, weight_decay=0.0, gradient_clipping=0.5)
    assert resolved.get("optimizer.params") == {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 0.0}
    assert resolved.get("gradient_clipping") == 0.5
    assert resolved.schedule.peak == 1e-3


def test_a_ramp_up_sets_the_batch_and_scales_the_rates(tmp_path: Path) -> None:
    """At the end of the ramp 4 ranks have 3 micro-batches of 2 samples; 4 times the reference batch."""
    muon = {"type": "Muon", "params": {"lr": 0.02, "muon_lr": 0.04, "adam_lr": 0.001}}
    flags = {"batch_schedule": "0:8,640:16,6400:24", "lr_reference_batch": 6, "micro_batch_size": 2}
    resolved = resolve(tmp_path, {"optimizer": muon, "zero_optimization": {"stage": 2}}, world_size=4,
                       lr_scaling="sqrt", **flags)
    assert (resolved.layout.gradient_accumulation_steps, resolved.get("train_batch_size")) == (3, 24)
    assert resolved.length.batch_sizes.stages == ((0, 8), (10, 16), (100, 24))
    assert resolved.length.samples == 2 * 8 + 6 * 16 + 92 * 24
    rates = resolved.get("optimizer.params")
    assert [rates[name] for name in ("lr", "muon_lr", "adam_lr")] == [0.04, 0.08, 0.002]
    assert resolved.schedule.peak == 0.04
    assert resolve(tmp_path, {}, world_size=4, learning_rate=1e-3, lr_scaling="linear", **flags).schedule.peak == 4e-3


def test_min_lr_is_not_scaled(tmp_path: Path) -> None:
    schedule = resolve(tmp_path, {}, learning_rate=1e-3, lr_scaling="linear", lr_reference_batch=2, micro_batch_size=8,
                       min_lr=1e-4).schedule
    assert (schedule.peak, schedule(99)) == (4e-3, pytest.approx(1e-4, rel=1e-12))


@pytest.mark.parametrize(("values", "flags", "message"), [
    ({"train_batch_size": 8}, {}, "ds.json:1: train_batch_size: found 8, but --batch_schedule 24"),
    ({"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}, {},
     "--batch_schedule: found 24 != 2 x 2 x 4"),
    ({}, {"micro_batch_size": 3}, "--batch_schedule: found a global batch of 8; expected a multiple of 12"),
    ({}, {"global_batch_size": 16}, "--batch_schedule: found 24 as the last global batch"),
])
def test_a_ramp_up_must_fit_the_batch_sizes(tmp_path: Path, values: dict, flags: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(tmp_path, values, world_size=4, batch_schedule="0:8,640:24", **flags)


def test_a_flag_fills_a_missing_key_or_repeats_the_value_of_the_json(tmp_path: Path) -> None:
    bare = {"type": "AdamW"}
    assert resolve(tmp_path, {"optimizer": bare}, weight_decay=0.3).get("optimizer.params.weight_decay") == 0.3
    assert resolve(tmp_path, {"optimizer": bare}).get("optimizer.params") == {"lr": 3e-4}
    own = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}}
    assert resolve(tmp_path, {"optimizer": own}, learning_rate=1e-3, adam_beta1=0.8).schedule.peak == 1e-3


@pytest.mark.parametrize(("values", "flag", "expected"), [
    ({}, None, "fp32"),
    ({}, "bf16", "bf16"),
    ({}, "fp16", "fp16"),
    ({"bf16": {"enabled": "auto"}}, None, "bf16"),
    ({"bf16": {"enabled": "auto"}}, "fp32", "fp32"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, None, "bf16"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp16", "fp16"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, None, "fp16"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16", "bf16"),
    ({"bfloat16": {"enabled": True}}, None, "bf16"),
    ({"bf16": {"enabled": False}}, None, "fp32"),
])
def test_precision_of_json_and_flag(tmp_path: Path, values: dict, flag: str | None, expected: str) -> None:
    resolved = resolve(tmp_path, values, precision=flag)
    assert resolved.layout.precision == expected
    assert [name for name in ("bf16", "fp16") if resolved.get(f"{name}.enabled")] == \
        ([] if expected == "fp32" else [expected])


def test_auto_sizes_follow_the_hidden_size_as_in_transformers(tmp_path: Path) -> None:
    auto = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9}
    assert resolve(tmp_path, {"zero_optimization": auto}).get("zero_optimization") == {
        "stage": 3, "reduce_bucket_size": 128 * 128, "stage3_prefetch_bucket_size": int(0.9 * 128 * 128),
        "stage3_param_persistence_threshold": 1280, "sub_group_size": 10**9}
    del auto["sub_group_size"]
    resolved = resolve(tmp_path, {"zero_optimization": {**auto, "stage": 2}})
    assert resolved.get("zero_optimization") == {"stage": 2, "reduce_bucket_size": 128 * 128}


def test_auto_values_of_the_scheduler(tmp_path: Path) -> None:
    auto = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    values = {"scheduler": {"type": "WarmupDecayLR", "params": auto}}
    resolved = resolve(tmp_path, values, learning_rate=1e-3, lr_warmup_steps=7)
    assert resolved.get("scheduler.params") == {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 7,
                                                "total_num_steps": 100}
    assert resolved.schedule is None
    assert resolve(tmp_path, values).get("scheduler.params.warmup_num_steps") == 1


def test_blocks_that_request_nothing_are_removed(tmp_path: Path) -> None:
    blocks = {"autotuning": {"enabled": False}, "data_efficiency": {"enabled": False},
            "compile": {"deepcompile": False}, "torch_autocast": {"enabled": False}, "dataloader_drop_last": False,
            "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}}
    resolved = resolve(tmp_path, blocks)
    assert not set(resolved.ds_config) & set(blocks) - {"activation_checkpointing"}
    assert resolved.get("activation_checkpointing") == {}


def test_deepspeed_accepts_every_resolved_file_of_ds_configs(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    (tmp_path / "nvme").mkdir()
    for path in CONFIGS:
        file = read_ds_config(str(path))
        nvme = str(tmp_path / "nvme") if "nvme" in path.stem else None
        ranks = int(re.findall(r"// ranks: (\d+)", path.read_text(encoding="utf-8"))[0])
        model = MIXTURE if "experts" in path.stem else load_model_config("tiny")
        resolved = resolve_ds_config(file, dataclasses.replace(ARGS, nvme_path=nvme), world_size=ranks, model=model,
                                     device=CUDA)
        check_rules(resolved)
        config = engine_config(json.loads(json.dumps(resolved.ds_config)))
        config["train_batch_size"] //= resolved.layout.data_parallel_size  # DeepSpeed runs with one rank here
        own = DeepSpeedConfig(config)
        assert own.zero_optimization_stage == resolved.layout.zero_stage
        assert "auto" not in re.findall(r"\w+", json.dumps(resolved.ds_config))


def test_pipeline_stages_can_be_split_by_blocks(tmp_path: Path) -> None:
    from pretrain.model.layers.block import Block
    pipeline = {"stages": 2, "partition_method": f"type:{Block.__name__}"}
    resolved = resolve(tmp_path, {"pipeline": pipeline}, world_size=2)
    assert resolved.layout.partition_method == "type:Block"


@pytest.mark.parametrize(("word", "method"), [("FLOPs", "flops"), ("Parameters", "parameters"), ("best", "flops")])
def test_partition_methods_are_case_insensitive(tmp_path: Path, word: str, method: str) -> None:
    resolved = resolve(tmp_path, {"pipeline": {"stages": 2, "partition_method": word}}, world_size=2)
    assert resolved.layout.partition_method == resolved.get("pipeline.partition_method") == method


def test_monitors_write_into_the_run_folder(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {"csv_monitor": {"enabled": True, "job_name": "x"}})
    assert resolved.get("csv_monitor.output_path") == "run/csv"


@pytest.mark.parametrize("name", ["prescale_gradients", "gradient_predivide_factor"])
def test_a_note_says_where_factors_of_the_gradients_have_no_effect(tmp_path: Path, name: str) -> None:
    values = {name: True if name == "prescale_gradients" else 2}
    for zero, has_note in (({"stage": 1}, True), ({"stage": 1, "reduce_scatter": False}, False), ({"stage": 0}, False)):
        notes = resolve(tmp_path, {**values, "zero_optimization": zero}).notes
        assert (f'{name}: no effect at ZeRO stage 1 with "reduce_scatter"' in notes) == has_note


@pytest.mark.parametrize("values", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_timers_of_a_pipeline_engine_get_an_interval(tmp_path: Path, values: dict) -> None:
    """Without an interval, DeepSpeed's PipelineEngine fails in `global_steps % None`."""
    assert resolve(tmp_path, values, log_interval=7).get("steps_per_print") == 7
    assert resolve(tmp_path, {**values, "steps_per_print": 3}).get("steps_per_print") == 3
    assert resolve(tmp_path, {**values, "zero_optimization": {"stage": 2}}).get("steps_per_print") is None


CONTRADICTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "train_batch_size": (8, {"global_batch_size": 16}, "8, but --global_batch_size 16"),
    "train_micro_batch_size_per_gpu": (2, {"micro_batch_size": 4}, "2, but --micro_batch_size 4"),
    "gradient_accumulation_steps": (2, {"gradient_accumulation_steps": 4}, "2, but --gradient_accumulation_steps 4"),
    "gradient_clipping": (1.0, {"gradient_clipping": 0.5}, "1.0, but --gradient_clipping 0.5"),
    "optimizer.params.lr": (1e-3, {"learning_rate": 1e-4}, "0.001, but --learning_rate 0.0001"),
    "optimizer.params.weight_decay": (0.0, {"weight_decay": 0.1}, "0.0, but --weight_decay 0.1"),
    "optimizer.params.eps": (1e-8, {"adam_epsilon": 1e-6}, "1e-08, but --adam_epsilon 1e-06"),
    "optimizer.params.betas": ([0.9, 0.95], {"adam_beta2": 0.99}, "[0.9, 0.95], but --adam_beta1 / --adam_beta2"),
    "bf16.enabled": (True, {"precision": "fp32"}, "true, but --precision fp32"),
    "scheduler.params.warmup_num_steps": (5, {"lr_warmup_steps": 3}, "5, but --lr_warmup_steps 3"),
    "scheduler.type": ("WarmupLR", {"lr_decay_steps": 4}, 'scheduler "WarmupLR", but --lr_decay_steps 4'),
}


@pytest.mark.parametrize("keys", [tuple(CONTRADICTIONS)[:2], tuple(CONTRADICTIONS)], ids=len)
def test_one_error_names_all_contradictions_between_the_json_and_flags(tmp_path: Path, keys: tuple[str, ...]) -> None:
    values: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {}}}
    flags: dict[str, Any] = {}
    for key in keys:
        value, flag, _ = CONTRADICTIONS[key]
        if key.startswith("scheduler"):
            set_value(values, "scheduler.type", "WarmupLR")
        set_value(values, key, value)
        flags.update(flag)
    with pytest.raises(ConfigError, match=f"{len(keys)} settings contradict flags") as caught:
        resolve(tmp_path, values, **flags)
    assert [key for key in keys if CONTRADICTIONS[key][2] not in str(caught.value)] == []
