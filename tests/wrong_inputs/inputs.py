"""Wrong inputs to a run: changes to a valid JSON, changes to valid flags, and the text that the error must contain."""

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.checkpoint.format.files import FileRecord
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.safetensors_header import header_bytes
from pretrain.data.files.writer import IndexedWriter
from pretrain.model.config import model_config_from

BASE: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 1},
}
NOTHING = object()  # this value removes the key


def z(name: str, value: Any, stage: int = 3) -> dict[str, Any]:
    return {"zero_optimization.stage": stage, f"zero_optimization.{name}": value}


def change(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, name = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    if value is NOTHING:
        del values[name]
    else:
        values[name] = value


def make_world(folder: Path) -> None:
    """Write data, a tokenizer, a JSON and a finished run, and damaged copies of some of them."""
    rng = np.random.default_rng(0)
    for name, largest, meta in (
        ("corpus", 500, {"vocab_size": 512, "max_token": 499, "eod_token": 0, "tokenizer_sha256": "ab" * 32}),
        ("foreign", 500, None),
        ("few", 300, None),
        ("big", 500, {"vocab_size": 60000, "max_token": 59999}),
        ("big_foreign", 60000, None),
    ):
        with IndexedWriter(folder / name, np.uint16) as writer:
            for _ in range(100):
                writer.add_document(rng.integers(0, largest, 200))
            writer.finalize(meta)
    (folder / "dynamic_rope.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}))
    with IndexedWriter(folder / "short", np.uint16) as writer:
        writer.add_document(rng.integers(0, 500, 40))
        writer.finalize()
    for name in ("truncated", "corrupt", "lonely"):
        for suffix in ("bin", "idx"):
            (folder / f"{name}.{suffix}").write_bytes((folder / f"corpus.{suffix}").read_bytes())
    (folder / "truncated.bin").write_bytes((folder / "corpus.bin").read_bytes()[:-2])
    (folder / "corrupt.idx").write_bytes(b"nonsense" + (folder / "corpus.idx").read_bytes()[8:])
    (folder / "lonely.bin").unlink()
    vocab = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, 300)}}
    tokenizer = {"version": "1.0", "added_tokens": [],
                 "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w1"},
                 "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                 "truncation": None, "padding": None}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "file").write_text("a file")
    (folder / "broken.json").write_text('{"train_batch_size": 1\n "bf16": {}}')
    (folder / "twice.json").write_text('{"train_batch_size": 1,\n "train_batch_size": 2}')
    (folder / "list.json").write_text("[]")
    (folder / "nvme").mkdir()
    (folder / "ds.json").write_text(json.dumps(BASE))
    (folder / "text.txt").write_text("Some text. " * 50)
    for suffix in ("bin", "idx"):
        (folder / f"plain.{suffix}").write_bytes((folder / f"corpus.{suffix}").read_bytes())
    _make_run(folder / "done", str(folder))
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(HF_MODEL))
    (folder / "hf" / "model.safetensors").write_bytes(safetensors_of(HF_MODEL))


HF_MODEL = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


def safetensors_of(values: dict[str, Any]) -> bytes:
    """Return a safetensors file with the weights of a config.json, which are all 0."""
    tensors = [(name, "fp32", shape) for rule in model_config_from(values, "config.json").tensors()
               for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True)]
    return header_bytes(tensors) + bytes(4 * sum(prod(shape) for _, _, shape in tensors))


def _make_run(run: Path, tokenizer: str) -> None:
    """Write a run with one checkpoint. It has only the files that the tools read before they import torch."""
    checkpoint = run / "checkpoints" / "global_step5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.pt").write_bytes(b"weights")
    manifest = Manifest(
        step=5, consumed_samples=5, world_size=1, data_parallel_size=1, pipeline_stages=1, zero_stage=1,
        precision="bf16", grad_accum_dtype=None, offload_optimizer="none", offload_param="none", optimizer={},
        global_batch_size=1, seed=1, seq_length=64, model={"model_type": "gpt2"}, data_fingerprint="",
        tokenizer_fingerprint=None, versions={}, files={"weights.pt": FileRecord(7, "ab" * 32)})
    (checkpoint / "manifest.json").write_text(manifest.to_json())
    (run / "run.json").write_text(json.dumps([{"flags": {"tokenizer": tokenizer}, "train_steps": 5}]))
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')


UNTESTED = {"zero_allow_untested_optimizer": True}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
UNTIED = {"model_overrides": "tie_word_embeddings=false"}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # the file
    ({}, {"deepspeed_config": NOTHING}, "--deepspeed_config: found nothing"),
    ({}, {"deepspeed_config": "{world}/none.json"}, "none.json"),
    ({}, {"deepspeed_config": "{world}/broken.json"}, "broken.json:2"),
    ({}, {"deepspeed_config": "{world}/twice.json"}, "twice.json:2: train_batch_size"),
    ({}, {"deepspeed_config": "{world}/list.json"}, "expected an object"),
    # numbers at the limits
    ({"optimizer.params.betas": [0.9, 1.0]}, {}, "optimizer.params.betas"),
    ({"zero_optimization.stage": 1, "zero_optimization.allgather_bucket_size": 0}, {}, "allgather_bucket_size"),
    ({"optimizer.params.lr": float("inf")}, {}, "optimizer.params.lr: found Infinity"),
    ({"optimizer.params.betas": [0.9, float("nan")]}, {}, "optimizer.params.betas: found [0.9, NaN]"),
    ({"optimizer.params.betas": [0.9, "0.95"]}, {}, "a list of two numbers"),
    ({"zero_optimization.reduce_bucket_size": 1e30}, {}, "reduce_bucket_size: found 1e+30"),
    ({"zero_optimization.reduce_bucket_size": 2**64}, {}, "an integer of at most 64 bits"),
    ({}, {"learning_rate": "inf"}, "--learning_rate: found inf"),
    ({}, {"seed": 2**40}, "--seed: found 1099511627776"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "NVMe", "nvme_path": "/tmp"}}}, {},
     "offload_optimizer.device"),
    # keys
    ({"zero_optimisation": {"stage": 3}}, {}, 'Did you mean "zero_optimization"'),
    ({"zero_optimization.stge": 3}, {}, 'Did you mean "stage"'),
    ({"stage": 2}, {}, 'belongs under "zero_optimization"'),
    ({"bf16.loss_scale": 0}, {}, 'belongs under "fp16"'),
    ({"zero_optimization.gradient_cliping": 1}, {}, 'Did you mean "gradient_clipping" at the top level'),
    ({"optimizer.params.learning_rate": 1}, {}, 'Did you mean "lr"'),
    ({"zero_optimization.comm_overlap": True}, {}, 'Did you mean "overlap_comm"'),
    ({"zero_optimization.stage3_param_persitance_threshold": 1e5}, {}, '"stage3_param_persistence_threshold"'),
    ({"monitor_config": {"enabled": True}}, {}, "Remove unknown keys: DeepSpeed 0.19.8 would ignore them"),
    ({"optimizer.lr": 1}, {}, 'belongs under "optimizer.params"'),
    ({"zero_optimization.offload_optimizer": {"devise": "cpu"}}, {}, 'Did you mean "device"'),
    ({"elasticity": {"enabled": True}}, {}, "Elastic training has been removed"),
    ({"amp": {"enabled": "auto"}}, {}, "Apex AMP"),
    ({"zero_optimization.mics_shard_size": 2}, {}, "MiCS"),
    # types and ranges
    ({"zero_optimization.stage": "two"}, {}, 'zero_optimization.stage: found "two"'),
    ({"zero_optimization.stage": 4}, {}, "from 0 to 3"),
    ({"zero_optimization.stage": True}, {}, "zero_optimization.stage: found true"),
    ({"zero_optimization": True}, {}, "zero_optimization: found true; expected an object"),
    ({"bf16.enabled": "yes"}, {}, 'bf16.enabled: found "yes"'),
    ({"train_batch_size": 0}, {}, "train_batch_size: found 0"),
    ({"train_batch_size": 1.5}, {}, "train_batch_size: found 1.5"),
    ({"gradient_clipping": -1}, {}, "gradient_clipping: found -1"),
    ({"optimizer.params.betas": 0.9}, {}, "a list of two numbers"),
    ({"optimizer.params.lr": 0}, {}, "a rate above 0"),
    ({"wall_clock_breakdown": "auto"}, {}, 'Nothing fills "auto" here'),
    ({"zero_optimization.stage": "auto"}, {}, "zero_optimization.stage"),
    ({"zero_optimization": "auto"}, {}, 'zero_optimization: found "auto"; expected an object'),
    ({"csv_monitor": []}, {}, "csv_monitor: found []"),
    ({"tensorboard": "on"}, {}, 'tensorboard: found "on"'),
    ({"wandb": None}, {}, "wandb: found null"),
    ({"comms_logger": {"enabled": True, "prof_ops": [1]}}, {}, "a list of strings"),
    ({"bf16.enabled": "true"}, {}, 'bf16.enabled: found "true"; expected true or false'),
    # keys that are not supported
    ({"data_efficiency": {"enabled": True}}, {}, "data_efficiency"),
    ({"autotuning": {"enabled": True}}, {}, "autotuning"),
    ({"hybrid_engine": {"enabled": True}}, {}, "hybrid_engine"),
    ({"tensor_parallel": {"autotp_size": 2}}, {}, "Tensor parallelism is not supported"),
    ({"sequence_parallel_size": 2}, {}, "Sequence parallelism is not supported"),
    ({"expert_parallel": {"enabled": True}}, {}, "expert_parallel"),
    ({"checkpoint": {"writer": {"type": "FAST"}}}, {}, "checkpoint.writer"),
    ({"checkpoint": {"load_universal": True}}, {}, "checkpoint.load_universal"),
    ({"activation_checkpointing": {"partition_activations": "yes"}}, {}, "partition_activations: found"),
    ({"activation_checkpointing": {"cpu_checkpoint": True}}, {}, '"cpu_checkpointing"'),
    ({"sequence_parallel_size": True}, {}, "sequence_parallel_size: found true"),
    ({"torch_autocast": {"enabled": True, "dtype": "fp16"}}, {}, "torch_autocast"),
    ({"gradient_allreduce_op": "sum"}, {}, "gradient_allreduce_op"),
    ({"pipeline": {"use_reentrant": True}}, {}, "pipeline.use_reentrant"),
    ({"pipeline": {"seed_layers": True}}, {}, "pipeline.seed_layers"),
    ({"pipeline": {"partition_method": "profile"}}, {}, "pipeline.partition_method"),
    (z("stage3_max_live_parameters", -1, stage=2), {}, "stage3_max_live_parameters: found -1"),
    (z("stage3_max_live_parameters", 10) | {"zero_optimization.max_live_parameters": 10}, {}, "found both"),
    (z("cpu_offload", True) | {"zero_optimization.offload_optimizer": {"device": "cpu"}}, {}, "of the same setting"),
    ({"pipeline": {"partition_method": "type:GPTBlock"}}, {}, "pipeline.partition_method"),
    ({"pipeline": {"partition_method": "type:("}}, {}, "pipeline.partition_method"),
    # ZeRO, offload, pipeline
    (z("stage", 2) | {"pipeline": {"stages": 2}}, {"world_size": 2}, "pipeline.stages: found 2 with zero_opt"),
    (z("stage", 3) | {"pipeline": {"stages": 2}}, {"world_size": 2}, "pipeline.stages: found 2 with zero_opt"),
    ({"pipeline": {"stages": 2}}, {"world_size": 3}, "2 stages on 3 ranks"),
    ({"pipeline": {"stages": 2}}, {"world_size": 1}, "2 stages on 1 ranks"),
    ({"pipeline": {"stages": 5}}, {"world_size": 5}, "at most 4, the model's layers"),
    (z("offload_optimizer", NVME, stage=2), {"nvme_path": "{world}/nvme"}, "NVMe needs stage 3"),
    (z("offload_optimizer", CPU, stage=0), {}, "offload_optimizer.device"),
    (z("offload_optimizer", NVME), {}, "DS_PRETRAIN_NVME_PATH"),
    (z("offload_optimizer", NVME), {"nvme_path": "{world}/none"}, "{world}/none"),
    (z("offload_optimizer", {**NVME, "nvme_path": "/a"}), {"nvme_path": "/b"}, "found /a, but --nvme_path /b"),
    (z("offload_param", {**NVME, "buffer_size": 100}), {"nvme_path": "{world}/nvme"}, "buffer_size"),
    ({}, {"nvme_path": "{world}/nvme"}, "--nvme_path"),
    (z("zero_hpz_partition_size", 3), {"world_size": 4}, "zero_hpz_partition_size"),
    (z("zero_quantized_weights", True), {}, "zero_quantized_weights"),
    ({"pipeline": {"stages": 2}, "wall_clock_breakdown": True}, {"world_size": 2}, "wall_clock_breakdown"),
    ({"pipeline": {"stages": 2}, "flops_profiler": {"enabled": True}}, {"world_size": 2}, "flops_profiler.enabled"),
    (z("stage", 2) | {"prescale_gradients": True}, {}, "prescale_gradients"),
    # precision
    ({"fp16": {"enabled": True}}, {}, "Enable only one of the two"),
    ({"bfloat16": {"enabled": False}}, {}, "bfloat16: \"bf16\" is set too"),
    ({"bf16": {}, "bfloat16": {"enabled": True}}, {}, "names of the same setting"),
    ({"bf16": NOTHING, "fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 17}},
     {"emulate_fp16": True}, "fp16.min_loss_scale: found 17; expected 1 to 16"),
    ({"bf16": NOTHING, "fp16": {"enabled": True, "loss_scale_window": 0}}, {"emulate_fp16": True}, "loss_scale_window"),
    ({"bf16.enabled": False, "fp16": {"enabled": True}}, {}, "--emulate_fp16"),
    ({}, {"emulate_fp16": True}, "--emulate_fp16"),
    ({}, {"tf32": True}, "--tf32: found a run in bf16 on cpu"),
    ({}, {"tf32": True, "device": "cuda"}, "--tf32: found a run in bf16 on cuda"),
    ({}, {"precision": "fp16"}, "but --precision fp16"),
    ({}, {"precision": "bf61"}, "--precision"),
    ({"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}, {}, '"auto" without --precision'),
    ({"zero_optimization.stage": 0, "data_types": {"grad_accum_dtype": "fp32"}}, {}, "data_types.grad_accum_dtype"),
    ({"data_types": {"grad_accum_dtype": "fp16"}}, {}, "data_types.grad_accum_dtype"),
    ({"data_types": {"param_dtype": "fp32"}}, {}, "data_types.param_dtype"),
    ({"bf16.immediate_grad_update": True}, {}, "bf16.immediate_grad_update"),
    ({"bf16.bf16_master_weights_and_grads": True}, {}, "bf16_master_weights_and_grads"),
    # optimizer and scheduler
    ({"optimizer": NOTHING}, {}, "optimizer: the block is missing, and there is no --learning_rate"),
    ({"optimizer": NOTHING}, {"learning_rate": 0}, "--learning_rate"),
    ({"optimizer.type": NOTHING}, {}, "optimizer.type: found nothing"),
    ({"optimizer.type": "AdamM"}, {}, 'Did you mean "Adam'),
    ({"optimizer.type": "OneBitAdam"}, {}, "no 1-bit optimizers"),
    ({"optimizer.type": "CPUAdam"}, {}, "offload_optimizer"),
    ({"optimizer.type": "Lion"}, {}, "runs on this CPU device"),
    ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {}, "zero_allow_untested_optimizer"),
    ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, {}, 'Did you mean "momentum"'),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}, **UNTESTED}, {}, "nesterov"),
    ({"optimizer": {"type": "Rprop", "params": {"etas": [1, 2]}}, **UNTESTED}, {}, ".etas"),
    ({"csv_monitor": {"enabled": True, "output_path": "/dev/null/csv"}}, {}, "csv_monitor.output_path"),
    ({"csv_monitor": {"enabled": True, "output_path": "x" * 300}}, {}, "csv_monitor.output_path"),
    ({"train_batch_size": 2**40}, {}, "from 1 to 2147483647"),
    ({"optimizer": {"type": "Lion"}}, {"adam_epsilon": 1e-6, "device": "cuda"}, "--adam_epsilon"),
    ({"optimizer": {"type": "Adagrad"}}, {}, "for Adagrad with ZeRO"),
    (z("offload_optimizer", CPU) | {"optimizer.type": "Muon"}, {}, "which run on the CPU"),
    (z("stage", 3) | {"optimizer.type": "Muon"}, {}, "zero_optimization.reduce_scatter"),
    ({"optimizer.type": "Muon", "zero_optimization.stage": 0}, {}, "for Muon"),
    ({"optimizer.params.max_grad_norm": 1}, {}, '"gradient_clipping" at the top level'),
    ({"optimizer.params.adam_w_mode": False}, {}, "optimizer.params.adam_w_mode"),
    ({}, {"learning_rate": 1e-4}, "found 0.001, but --learning_rate 0.0001"),
    ({}, {"adam_beta1": 0.8}, "optimizer.params.betas"),
    ({"scheduler": {"type": "WarmupLr"}}, {}, 'Did you mean "WarmupLR"'),
    ({"scheduler": {"type": "WarmupLR"}}, {"lr_schedule": "linear"}, "--lr_schedule"),
    ({"scheduler": {"type": "WarmupLR"}}, {"lr_warmup_steps": 5}, "--lr_warmup_steps"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": -1, "cycle_max_lr": 1}}}, {}, "lr: found -1"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 2, "cycle_max_lr": 1}}}, {}, "at most cycle_max_lr"),
    ({"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": -1}}}, {}, "lr_range_test_min_lr"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, {}, "scheduler.params.total_num_steps"),
    # batch
    (dict(zip(BASE, (7, 2, 2), strict=False)), {}, "7 != 2 x 2 x 1"),
    ({"train_batch_size": 6}, {"world_size": 4}, "6 != 1 x 1 x 4"),
    ({"train_batch_size": 8}, {"global_batch_size": 16}, "found 8, but --global_batch_size 16"),
    ({"train_batch_size": 2}, {"world_size": 4}, "2 != "),
    (dict.fromkeys(list(BASE)[:3], NOTHING), {}, "no batch size"),
    ({}, {"micro_batch_size": 0}, "--micro_batch_size"),
    # length and schedule
    ({}, {"train_steps": NOTHING}, "neither of them"),
    ({}, {"train_tokens": 10}, "both"),
    ({}, {"train_steps": 0}, "--train_steps"),
    ({}, {"lr_schedule": "cosin"}, 'Did you mean "cosine"'),
    ({}, {"lr_warmup_steps": 51}, "--lr_warmup_steps"),
    ({}, {"min_lr_ratio": 2}, "--min_lr_ratio"),
    # initial weights, muP and dropout
    ({}, {"init_method": "smal_init"}, 'Did you mean "small_init"'),
    ({}, {"init_method": "wang_init", "output_init_method": "small_init", "init_std": 0.1}, "--init_std"),
    ({}, {"init_std": 0}, "--init_std"),
    ({}, {"residual_dropout": 1}, "--residual_dropout: found 1.0; expected a probability"),
    ({}, {"mup_base_width": 32}, "--model_overrides tie_word_embeddings=false"),
    ({}, {"mup_base_width": 48, **UNTIED}, "--mup_base_width: found 48; expected a multiple of 32"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "zero_optimization.stage": 2},
     {"mup_base_width": 32, **UNTIED},
     "expected Adam, AdamW or Lion with --mup_base_width"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {"mup_base_width": 32, **UNTIED},
     "it sets one learning rate for all parameters"),
    ({}, {"save_interval": -1}, "--save_interval"),
    ({}, {"log_interval": 0}, "--log_interval"),
    ({}, {"exit_step": 51}, "--exit_step"),
    ({}, {"resume": "allways"}, "--resume"),
    ({}, {"deepspeed_log_level": "loud"}, "--deepspeed_log_level"),
    ({}, {"world_size": 0}, "--world_size: found '0'"),
    # model
    ({}, {"model": "tiyn"}, 'Did you mean "tiny"'),
    ({}, {"model": NOTHING}, "--model"),
    ({}, {"model": "{world}/none/config.json"}, "none/config.json"),
    ({}, {"model_overrides": "n_layers=3"}, 'Did you mean "n_layer"'),
    ({}, {"model_overrides": "n_embd=130"}, "n_embd"),
    ({}, {"seq_length": 513}, "at most 512"),
    ({}, {"seq_length": 0}, "--seq_length"),
    ({}, {"seq_length_schedule": "0:48"}, "a divisor of --seq_length, 64"),
    ({}, {"seq_length_schedule": "1e9:32"}, "rise from 0"),
    ({}, {"first_sample": -1}, "--first_sample"),
    ({}, {"order_samples": 1000}, "--order_samples: found 1000 with --sample_order shuffled"),
    ({}, {"order_samples": 1, "first_sample": 10**7, "sample_order": "neox"}, "an order of"),
    # data
    ({}, {"train_data": NOTHING}, "--train_data"),
    ({}, {"train_data": "{world}/none"}, "none.idx"),
    ({}, {"train_data": "{world}/lonely"}, "lonely.bin"),
    ({}, {"train_data": "{world}/truncated"}, "truncated.bin"),
    ({}, {"train_data": "{world}/corrupt"}, "corrupt.idx"),
    ({}, {"train_data": "{world}/short"}, "short"),
    ({}, {"train_data": "{world}/big"}, "token 59999"),
    ({}, {"train_data": "{world}/big_foreign"}, "at most the model's vocab_size, 8192"),
    ({}, {"valid_data": "{world}/big"}, "--valid_data"),
    ({}, {"valid_data": "{world}/short"}, "at least 65"),
    ({}, {"blend_schedule": "0:1"}, "there is nothing to blend"),
    ({}, {"sample_order": "megatorn"}, 'Did you mean "megatron"'),
    ({}, {"split": "90,20,x"}, "--split"),
    ({}, {"global_batch_size": 16}, "8 validation samples"),
    ({}, {"tokenizer": "{world}/none"}, "--tokenizer"),
    ({}, {"tokenizer": "{world}/file"}, "--tokenizer"),
    ({}, {"tokenizer": "{world}"}, "abababababab"),
    ({}, {"tokenizer": "{world}", "model_overrides": "vocab_size=200"}, "--tokenizer"),
    ({}, {"train_data": "{world}/foreign", "eod_mask_loss": True}, "--eod_mask_loss"),
    ({}, {"train_data": "{world}/foreign", "document_attention": True}, "--document_attention"),
    ({}, {"model": "{world}/dynamic_rope.json", "document_attention": True}, "max_position_embeddings"),
    # the run folder and the command line
    ({}, {"save": NOTHING}, "--save"),
    ({}, {"save": "{world}/file"}, "--save"),
    ({}, {"save": "{world}/file/run"}, "--save"),
    ({}, {"sed": 3}, 'Did you mean "--seed"'),
    ({}, {"train_steps": "many"}, "many"),
    ({}, {"config": "{world}/none.yaml"}, "none.yaml"),
]
