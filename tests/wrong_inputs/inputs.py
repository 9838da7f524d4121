"""Wrong inputs to a run: changes to a valid JSON and to valid flags, with the text that the error must contain.

Wrong types and ranges of single flags and keys are generated in flags.py and files.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from tests.wrong_inputs.case import NOTHING, RUN, Case, of_extensions

BASE: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 1},
}


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


UNTESTED = {"zero_allow_untested_optimizer": True}
CPU, NVME = {"device": "cpu"}, {"device": "nvme"}
_TENSOR, _SEQUENCE = {"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}
_EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
_STAGES, _STAGE = {"pipeline": {"stages": 2}}, "zero_optimization.stage"
_MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
_TWO, _FOUR, _CUDA, _MIXTURE = {"world_size": 2}, {"world_size": 4}, {"device": "cuda"}, {"model": "tiny-moe"}
_NOISE_SCALE = {"noise_scale_interval": 2, "gradient_accumulation_steps": 4}
UNTIED = {"model_overrides": "tie_word_embeddings=false"}
# changes of BASE, flags, text of the error; " ... " stands for any text
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # the file
    ({}, {"deepspeed_config": NOTHING}, "--deepspeed_config: found nothing"),
    ({}, {"note": "x" * 2001}, "--note: found 2001 characters; expected at most 2000"),
    ({}, {"deepspeed_config": "{world}/broken.json"}, "broken.json:2"),
    ({}, {"deepspeed_config": "{world}/twice.json"}, "twice.json:2: train_batch_size"),
    ({}, {"deepspeed_config": "{world}/list.json"}, "expected an object"),
    # numbers at the limits
    ({"optimizer.params.betas": [0.9, 1.0]}, {}, "optimizer.params.betas"),
    ({"optimizer.params.lr": float("inf")}, {}, "optimizer.params.lr: found Infinity"),
    ({"optimizer.params.betas": [0.9, float("nan")]}, {}, "optimizer.params.betas: found [0.9, NaN]"),
    ({"zero_optimization.reduce_bucket_size": 1e30}, {}, "reduce_bucket_size: found 1e+30"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "NVMe", "nvme_path": "/tmp"}}}, {},
     "offload_optimizer.device"),
    # keys
    ({"stage": 2}, {}, 'belongs under "zero_optimization"'),
    ({"bf16.loss_scale": 0}, {}, 'belongs under "fp16"'),
    ({"zero_optimization.gradient_cliping": 1}, {}, 'Did you mean "gradient_clipping" at the top level'),
    ({"optimizer.params.learning_rate": 1}, {}, 'Did you mean "lr"'),
    ({"zero_optimization.comm_overlap": True}, {}, 'Did you mean "overlap_comm"'),
    ({"monitoring": {"enabled": True}}, {}, "Remove unknown keys: DeepSpeed would ignore them"),
    ({"monitor_config": {"csv_monitor": {"enabled": True}}}, {}, "reads monitors at the top level only"),
    ({"comms_config": {"comms_logger": {"enabled": True}}}, {}, '"comms_logger" at the top level only'),
    ({"compile": {"disable": False, "backend": "cudagraphs"}}, {}, 'found "cudagraphs"; expected one of "inductor"'),
    ({"compile": {"enabled": True, "kwargs": {"mode": "max"}}}, {}, "--compile_blocks takes no options"),
    ({"optimizer.lr": 1}, {}, 'belongs under "optimizer.params"'),
    ({"zero_optimization.offload_optimizer": {"devise": "cpu"}}, {}, 'Did you mean "device"'),
    ({"amp": {"enabled": True}}, {}, "Apex AMP"),
    # types and ranges
    ({"optimizer.params.lr": 0}, {}, "a rate above 0"),
    ({"wall_clock_breakdown": "auto"}, {}, 'Nothing fills "auto" here'),
    ({"zero_optimization.stage": "auto"}, {}, "zero_optimization.stage"),
    ({"zero_optimization": "auto"}, {}, 'zero_optimization: found "auto"; expected an object'),
    ({"comms_logger": {"enabled": True, "prof_ops": [1]}}, {}, "a list of strings"),
    # parallel degrees
    *((key, {}, f'rite the degree as "{block}": {{') for block, key in (
        ("tensor_parallel", {"autotp_size": 2}), ("tensor_parallel", {"tensor_parallel": {"tp_size": 2}}),
        ("tensor_parallel", {"model-parallel-size": 2}), ("pipeline", {"pipe-parallel-size": 2}),
        ("expert_parallel", {"expert_parallel": {"enabled": True, "ep_size": 2}}))),
    (_TENSOR, {}, "tensor_parallel.autotp_size: found 2, with 1 rank ... Launch 2 or 4 ranks"),
    (_TENSOR | {"pipeline": {"stages": 4}}, _FOUR, "tensor_parallel.autotp_size: ... Launch 8 or 16 ranks"),
    (_SEQUENCE, {}, "sequence_parallel_size: found 2, with 1 rank ... Launch 2 or 4 ranks"),
    (_STAGES, {"world_size": 3}, "pipeline.stages: found 2 stages on 3 ranks ... Launch 2, 4 or 6 ranks"),
    (_EXPERTS, {}, "autoep_size: found 2, with 1 rank ... a number that divides these ranks"),
    (_EXPERTS | _STAGES, _TWO, "autoep_size: found 2, with 1 rank ... a number that divides these ranks"),
    ({"expert_parallel": {"autoep_size": 2}}, {}, 'found 2; expected also "enabled": true ... DeepSpeed ignores the'),
    ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, _FOUR,
     'tensor_parallel.tp.tp_size: found 4; expected 2 ... "tensor_parallel": {"autotp_size": N}'),
    (_TENSOR | dict(zip(BASE, (8, 4, 2), strict=False)), _FOUR, "train_batch_size: found 8 != 4 x 2 x 2"),
    (_STAGES | {_STAGE: 2}, _TWO, "pipeline.stages: found 2 with zero_opt ... ZeRO stage 0 or 1"),
    (_STAGES | _TENSOR | {_STAGE: 3}, _FOUR, "pipeline.stages: found 2 with zero_opt ... ZeRO stage 0 or 1"),
    (_SEQUENCE | _STAGES, _FOUR, "sequence_parallel_size: found 2; expected 1 with pipeline stages ... (defect I "),
    (_SEQUENCE | _TENSOR, _FOUR, "sequence_parallel_size: ... Tensor-parallel ranks already share the sequences"),
    (_EXPERTS | _SEQUENCE, _FOUR, "autoep_size: ... set one of the two degrees to 1"),
    (_STAGES | _TENSOR | {"wall_clock_breakdown": True}, _FOUR, "wall_clock_breakdown: ... timers crash"),
    ({"flops_profiler": {"enabled": True}}, {"compile_blocks": True}, "flops_profiler.enabled: ... --compile_blocks"),
    # parallel degrees and the model
    ({"tensor_parallel": {"autotp_size": 8}}, {"world_size": 8}, "expected a divisor of the model's 4 attention heads"),
    (_TENSOR, _TWO | _MIXTURE | {"model_overrides": "num_key_value_heads=1"}, "the model's 1 key and value heads"),
    ({"sequence_parallel_size": 8}, {"world_size": 8}, "found 8; expected a divisor of the model's 4 attention heads"),
    (_EXPERTS, _TWO, "expert_parallel.autoep_size: ... choose a mixture-of-experts model"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, {"world_size": 3} | _MIXTURE, "the model's 4 experts"),
    (_TENSOR, _TWO | _MIXTURE, 'autoep_size: ... a multiple of "tensor_parallel.autotp_size": 2 ... "autoep_size": 2}'),
    (_TENSOR | _EXPERTS, _TWO | _MIXTURE | {"expert_capacity_factor": 1.0}, "--expert_capacity_factor: found 1.0"),
    (_SEQUENCE, _TWO | _MIXTURE, "sequence_parallel_size: ... use expert_parallel or ZeRO instead"),
    # parallel degrees and other settings
    (_EXPERTS | {_STAGE: 0}, _TWO | _MIXTURE, "zero_optimization.stage: ... stage 1 also needs less memory"),
    (_EXPERTS | _STAGES | {_STAGE: 0}, _FOUR | _MIXTURE, "zero_optimization.stage: ... stage 1 also needs less memory"),
    (_EXPERTS | z("zero_hpz_partition_size", 2), _FOUR | _MIXTURE, "hpz_partition_size: DeepSpeed's ZeRO++ does not"),
    (_EXPERTS | z("zero_quantized_weights", True), _TWO | _MIXTURE | _CUDA, "weights: DeepSpeed's ZeRO++ does not"),
    (_EXPERTS | z("offload_optimizer", NVME), _TWO | _MIXTURE | {"nvme_path": "{world}"}, "does not save experts"),
    (_EXPERTS | _MUON, _TWO | _MIXTURE, "optimizer.type: ... use AdamW"),
    (_EXPERTS, _TWO | _MIXTURE | _NOISE_SCALE, "--noise_scale_interval: found expert parallelism"),
    (_SEQUENCE, _TWO | _NOISE_SCALE, "--noise_scale_interval: ... has only the gradient of its shard"),
    (_SEQUENCE, _TWO | {"compile_blocks": True}, "--compile_blocks: ... leave --compile_blocks out"),
    (_SEQUENCE, _TWO | {"seq_length": 65}, "--seq_length: found length 65; expected a multiple of 2"),
    (_TENSOR, _TWO | {"seq_length_schedule": "0:1,99:64"}, "--seq_length_schedule: found length 1; expected"),
    (_SEQUENCE | {_STAGE: 0, "bf16": NOTHING, "fp16": {"enabled": True}}, _TWO | {"emulate_fp16": True},
     "zero_optimization.stage: found 0; expected 1, 2 or 3 with fp16"),
    (_SEQUENCE | {"communication_data_type": "bf16"}, _TWO, 'ignores it with "sequence_parallel_size"'),
    (_SEQUENCE | {"seq_parallel_communication_data_type": "bf16"}, _TWO, "expected fp32 at ZeRO stage 1"),
    (_TENSOR | _MUON, _TWO, "optimizer.type: ... use AdamW"),
    (_TENSOR | {"optimizer.type": "Lamb"} | UNTESTED, _TWO | _CUDA, "optimizer.type: ... use AdamW"),
    (_TENSOR | z("zero_hpz_partition_size", 2), _FOUR, "zero_hpz_partition_size: ... emove the key"),
    (z("stage", 3) | z("zero_hpz_partition_size", 2) | z("offload_param", NVME), _TWO | {"nvme_path": "{world}"},
     'zero_hpz_partition_size: found 2; expected 1 with "offload_param" to NVMe'),
    ({"optimizer.type": "Lamb"} | UNTESTED, {}, "optimizer.type: ... an optimizer that runs on this CPU device"),
    ({"optimizer.type": "Lamb", "fp16": {"enabled": False, "loss_scale": 2}} | UNTESTED, _CUDA,
     "optimizer.type: ... dynamic loss scaling"),
    (_TENSOR | z("zero_quantized_weights", True), _FOUR | _CUDA, "zero_quantized_weights: ... emove the key"),
    (_SEQUENCE | z("zero_quantized_gradients", True), _TWO | _CUDA, "zero_quantized_gradients: ... emove the key"),
    (z("zero_quantized_weights", True), _TWO, "zero_quantized_weights: ... need CUDA"),
    (z("zero_quantized_weights", True), {"world_size": 128, "model": "gpt2"} | _CUDA, "pad the vocabulary"),
    (z("zero_hpz_partition_size", 3), _FOUR, "zero_hpz_partition_size: ... a divisor of the 4 ranks"),
    ({"pipeline": {"partition_method": "profile"}}, {}, "pipeline.partition_method"),
    (z("stage3_max_live_parameters", -1, stage=2), {}, "stage3_max_live_parameters: found -1"),
    (z("stage3_max_live_parameters", 10) | {"zero_optimization.max_live_parameters": 10}, {}, "found both"),
    (z("cpu_offload", True) | {"zero_optimization.offload_optimizer": {"device": "cpu"}}, {}, "of the same setting"),
    ({"pipeline": {"partition_method": "type:GPTBlock"}}, {}, "pipeline.partition_method"),
    ({"pipeline": {"partition": "type:transformer"}}, {}, 'pipeline.partition: found "type:transformer"; expected'),
    ({"pipeline": {"partition_method": "type:("}}, {}, "pipeline.partition_method"),
    # recomputation
    ({"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute": "mlp"}, "found 1 with --recompute mlp"),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, {"recompute": "none"}, "found 1 with --recompute none"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, {"recompute": "attention"},
     "cpu_checkpointing: found true; expected false with --recompute attention"),
    ({}, {"recompute_every": 2}, "--recompute_every: found 2 without a part"),
    ({}, {"recompute": "none", "recompute_every": 2}, "--recompute_every: found 2 without a part"),
    ({}, {"recompute": "blocks", "recompute_every": 1000}, "--recompute_every: found 1000; expected at most"),
    ({}, {"mlp_tiles": 2, "recompute": "mlp"}, "--mlp_tiles: found 2 with --recompute mlp"),
    ({}, {"mlp_tiles": 65, "micro_batch_size": 1}, "--mlp_tiles: found 65; expected at most 64, the tokens of a micr"),
    # ZeRO, offload, pipeline
    ({"pipeline": {"stages": 5}}, {"world_size": 5}, "at most 4, the model's layers"),
    (z("offload_optimizer", NVME, stage=2), {"nvme_path": "{world}/nvme"}, "NVMe needs stage 3"),
    (z("offload_optimizer", CPU, stage=0), {}, "offload_optimizer.device"),
    (z("offload_optimizer", NVME), {}, "DS_PRETRAIN_NVME_PATH"),
    (z("offload_optimizer", NVME), {"nvme_path": "{world}/none"}, "{world}/none"),
    (z("offload_optimizer", {**NVME, "nvme_path": "/a"}), {"nvme_path": "/b"}, "found /a, but --nvme_path /b"),
    (z("offload_param", {**NVME, "buffer_size": 100}), {"nvme_path": "{world}/nvme"}, "buffer_size"),
    ({}, {"nvme_path": "{world}/nvme"}, "--nvme_path"),
    ({"pipeline": {"stages": 2}, "flops_profiler": {"enabled": True}}, {"world_size": 2}, "flops_profiler.enabled"),
    (z("stage", 2) | {"prescale_gradients": True}, {}, "prescale_gradients"),
    ({"gradient_predivide_factor": 1e-9}, {}, "gradient_predivide_factor: found 1e-09; expected a number from 1"),
    # precision
    ({"fp16": {"enabled": True}}, {}, "Enable only one of the two"),
    ({"bfloat16": {"enabled": False}}, {}, "bfloat16: \"bf16\" is set too"),
    ({"bf16": {}, "bfloat16": {"enabled": True}}, {}, "names of the same setting"),
    ({"bf16": NOTHING, "fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 17}},
     {"emulate_fp16": True}, "fp16.min_loss_scale: found 17; expected 1 to 16"),
    ({"bf16": NOTHING, "fp16": {"enabled": True, "loss_scale_window": 0}}, {"emulate_fp16": True}, "loss_scale_window"),
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
    (z("offload_optimizer", CPU) | {"bf16.bf16_master_weights_and_grads": True, "optimizer.params.torch_adam": True},
     {}, "without optimizer.params.torch_adam"),
    (z("offload_optimizer", CPU) | {"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True,
                                    "optimizer.params.fp32_optimizer_states": True},
     {}, "optimizer.params.fp32_optimizer_states: found true; expected false"),
    # optimizer and scheduler
    ({"optimizer": NOTHING}, {}, "optimizer: the block is missing, and there is no --learning_rate"),
    ({"optimizer": NOTHING}, {"learning_rate": 0}, "--learning_rate"),
    ({"optimizer.type": NOTHING}, {}, "optimizer.type: found nothing"),
    ({"optimizer.type": "AdamM"}, {}, 'Did you mean "Adam'),
    ({"optimizer.type": "OneBitAdam"}, {}, "no 1-bit optimizers"),
    ({"optimizer.type": "MuAdam"}, {}, 'Write type "Adam", and give the flag --mup_base_width'),
    ({"optimizer.type": "CPUAdam"}, {}, "offload_optimizer"),
    ({"optimizer.type": "Lion"}, {}, "runs on this CPU device"),
    ({"optimizer.type": "AdamW8bit"}, {}, "8-bit states need CUDA"),
    ({"optimizer.type": "AdamW8bit"}, {"device": "cuda"}, "the package bitsandbytes, which is not installed"),
    ({"optimizer.params.fused": True}, {}, '"torch_adam": true'),
    ({"optimizer": {"type": "Adafactor", "params": {"lr": 0.1}}}, {}, "zero_allow_untested_optimizer"),
    ({}, {"no_weight_decay": "*.mlp.donw.weight"}, 'Did you mean "*.mlp.down.weight"'),
    ({}, {"no_weight_decay": "bias"}, '"*bias*" matches'),
    ({"optimizer": {"type": "SGD", "params": {"momentun": 0.9}}}, {}, 'Did you mean "momentum"'),
    ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}, **UNTESTED}, {}, "nesterov"),
    ({"optimizer.params.eps": 0}, {}, "optimizer.params.eps: found 0; expected a number from 1.1e-19"),
    ({"optimizer": {"type": "Adafactor", "params": {"eps": [1e-30, 1e-3]}}, **UNTESTED}, {}, "no normal number"),
    ({"optimizer": {"type": "RMSprop", "params": {"alpha": 2}}, **UNTESTED}, {}, "optimizer.params.alpha: found 2"),
    ({"optimizer": {"type": "Rprop", "params": {"etas": [1, 2]}}, **UNTESTED}, {}, ".etas"),
    ({"csv_monitor": {"enabled": True, "output_path": "/dev/null/csv"}}, {}, "csv_monitor.output_path"),
    ({"csv_monitor": {"enabled": True, "output_path": "x" * 300}}, {}, "csv_monitor.output_path"),
    ({"train_batch_size": 2**40}, {}, "from 1 to 2147483647"),
    ({"optimizer": {"type": "Lion"}}, {"adam_epsilon": 1e-6, "device": "cuda"}, "--adam_epsilon"),
    ({"optimizer": {"type": "Adagrad"}}, {}, "for Adagrad with ZeRO"),
    (z("offload_optimizer", CPU) | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {}, "which run on the CPU"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 0.1, "muon_lr": 0.2}}, "scheduler": {"type": "WarmupLR"}}, {},
     "optimizer.params.muon_lr"),
    (z("stage", 3) | {"optimizer.type": "Muon"}, {}, "zero_optimization.reduce_scatter"),
    (z("offload_optimizer", NVME) | {"optimizer.type": "Muon"}, {"nvme_path": "{world}"}, '"cpu" or "none" for Muon'),
    (z("offload_optimizer", CPU) | {"optimizer.type": "AdamW8bit"}, {"device": "cuda"}, "which run on the CPU"),
    ({"optimizer.type": "Lamb"}, {"device": "cuda"}, "its updates depend on the layout"),
    ({"optimizer.type": "Muon", "zero_optimization.stage": 0}, {}, "for Muon"),
    ({"optimizer": {"type": "Adafactor", "params": {}}, **UNTESTED, **_STAGES}, {"world_size": 2},
     "with tied embeddings on 2 pipeline stages"),
    ({"optimizer.params.max_grad_norm": 1}, {}, '"gradient_clipping" at the top level'),
    ({"optimizer.params.adam_w_mode": False}, {}, "optimizer.params.adam_w_mode"),
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
    ({"train_batch_size": 2}, {"world_size": 4}, "2 != "),
    (dict(zip(BASE, (8, 2, 2), strict=False)), {}, "8 != 2 x 2 x 1 ... They fit 2 data-parallel ranks"),
    (dict.fromkeys(list(BASE)[:3], NOTHING), {}, "no batch size"),
    # length and schedule
    ({}, {"train_steps": NOTHING}, "neither of them"),
    ({}, {"lr_warmup_steps": 51}, "--lr_warmup_steps"),
    ({"scheduler": {"type": "WarmupLR"}}, {"lr_reference_batch": 8, "lr_scaling": "sqrt"}, "--lr_reference_batch"),
    ({"scheduler": {"type": "WarmupLR"}}, {"min_lr": 1e-6}, "--min_lr"),
    ({}, {"batch_schedule": "0:2,64"}, "--batch_schedule: found '64'; expected FROM_TOKENS:GLOBAL_BATCH"),
    ({}, {"batch_schedule": "10:2"}, "numbers of tokens that rise from 0"),
    ({}, {"batch_schedule": "0:4,64:2"}, "global batches of at least 1 sample that rise"),
    # loss and gradients
    ({}, {"label_smoothing": 1}, "--label_smoothing: found 1; expected below 1"),
    ({}, {"router_z_loss": 1e-3}, "--router_z_loss: the model has no experts"),
    ({}, {"router_aux_loss": 0.01}, "--router_aux_loss: the model has no experts"),
    ({}, {"expert_capacity_factor": 1.25}, "--expert_capacity_factor: the model has no experts"),
    ({}, {"model": "tiny-moe", "compile_blocks": True}, "--compile_blocks: found a model with experts"),
    ({}, {"model": "tiny-moe", "mup_base_width": 64}, "--mup_base_width: found a model with experts"),
    ({}, {"adaptive_clipping_window": 50}, "it has no effect without --adaptive_clipping"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "zero_optimization.stage": 2},
     {"gradient_value_clipping": 1}, "--gradient_value_clipping: found the optimizer Muon"),
    ({}, {"noise_scale_interval": 10}, "--noise_scale_interval: found one micro-batch in a step"),
    ({"train_batch_size": 2, "gradient_accumulation_steps": 2}, {"noise_scale_interval": 10,
                                                                  "gradient_value_clipping": 1},
     "--gradient_value_clipping changes the gradient"),
    # early stopping
    ({}, {"early_stopping_min_delta": 0.1}, "it has no effect without --early_stopping_patience"),
    ({}, {"early_stopping_patience": 3, "eval_interval": 0}, "the run has no evaluations before its end"),
    ({}, {"early_stopping_patience": 3, "eval_interval": 5, "split": "100,0,0"}, "the run has no validation data"),
    # initial weights, muP and dropout
    ({}, {"init_method": "smal_init"}, 'Did you mean "small_init"'),
    ({}, {"init_method": "wang_init", "output_init_method": "small_init", "init_std": 0.1}, "--init_std"),
    ({}, {"residual_dropout": 1}, "--residual_dropout: found 1.0; expected below 1"),
    ({}, {"mup_base_width": 32}, "--model_overrides tie_word_embeddings=false"),
    ({}, {"mup_base_width": 48, **UNTIED}, "--mup_base_width: found 48; expected a multiple of 32"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "zero_optimization.stage": 2},
     {"mup_base_width": 32, **UNTIED},
     "expected Adam, AdamW or Lion with --mup_base_width"),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {"mup_base_width": 32, **UNTIED},
     "it sets one learning rate for all parameters"),
    ({}, {"exit_step": 51}, "--exit_step"),
    ({}, {"world_size": 0}, "--world_size: found '0'"),
    # model
    ({}, {"model": "tiyn"}, 'Did you mean "tiny"'),
    ({}, {"model": NOTHING}, "--model"),
    ({}, {"model_overrides": "n_layers=3"}, 'Did you mean "n_layer"'),
    ({}, {"model_overrides": "n_embd=130"}, "n_embd"),
    ({}, {"seq_length": 513}, "at most 512"),
    ({}, {"seq_length_schedule": "0:48"}, "a divisor of --seq_length, 64"),
    ({}, {"seq_length_schedule": "1e9:32"}, "rise from 0"),
    ({}, {"order_samples": 1000}, "--order_samples: found 1000 with --sample_order shuffled"),
    ({}, {"skip_samples": "7:3"}, "--skip_samples: found '7:3'"),
    ({}, {"skip_samples": "5", "first_sample": 6}, "--skip_samples: sample 5 comes before --first_sample 6"),
    ({}, {"reorder_samples": "0:9,8:12"}, "--reorder_samples: the ranges 0:9 and 8:12 overlap"),
    # data
    ({}, {"train_data": NOTHING}, "--train_data"),
    ({}, {"train_data": "s3://bucket/corpus.bin"}, "without .bin"),
    ({}, {"train_data": "https://host/corpus?signature=x"}, "neither ? nor *"),
    ({}, {"train_data": "{world}/lonely"}, "lonely.bin"),
    ({}, {"train_data": "{world}/corpus.bin"}, "without .bin: {world}/corpus"),
    ({}, {"train_data": "{world}"}, "folder {world} has these prefixes: {world}/big"),
    ({}, {"train_data": "{world}/text.txt"}, "`ds-pretrain prepare` makes token files of the text in {world}/text.txt"),
    ({}, {"train_data": "{world}/truncated"}, "truncated.bin"),
    ({}, {"train_data": "{world}/corrupt"}, "corrupt.idx"),
    ({}, {"train_data": "{world}/short"}, "short"),
    ({}, {"train_data": "{world}/big"}, "token 59999"),
    ({}, {"train_data": "{world}/big_foreign"}, "token 59999; expected tokens below the model's vocab_size, 8192"),
    ({}, {"valid_data": "{world}/big"}, "--valid_data"),
    ({}, {"valid_data": "{world}/short"}, "at least 65"),
    ({}, {"blend_schedule": "0:1"}, "there is nothing to blend"),
    ({}, {"dataset_module": "x:y"}, "--dataset_module / --train_data: found both"),
    ({}, {"dataset_args": "{}"}, "--dataset_args: it has no effect without --dataset_module"),
    ({}, {"train_data": NOTHING, "dataset_module": "missing_module:build"}, "there is no module missing_module"),
    ({}, {"train_data": NOTHING, "dataset_module": "json:loads"}, "--dataset_module json:loads: loads('train', 64)"),
    ({}, {"sample_order": "shufled"}, 'Did you mean "shuffled"'),
    ({}, {"split": "90,20,x"}, "--split"),
    ({}, {"global_batch_size": 16}, "8 validation samples"),
    ({}, {"tokenizer": "{world}/file"}, "--tokenizer"),
    ({}, {"tokenizer": "{world}"}, "abababababab"),
    ({}, {"tokenizer": "{world}", "model_overrides": "vocab_size=200"}, "--tokenizer"),
    ({}, {"train_data": "{world}/foreign", "eod_mask_loss": True}, "--eod_mask_loss"),
    ({}, {"train_data": "{world}/foreign", "document_attention": True}, "--document_attention"),
    ({}, {"model": "{world}/dynamic_rope.json", "document_attention": True}, "max_position_embeddings"),
    # the run folder and the command line
    ({}, {"save": NOTHING}, "--save"),
    ({}, {"sed": 3}, 'Did you mean "--seed"'),
]
WRONG += [row for module in of_extensions() for row in getattr(module, "WRONG", ())]


def run_words(flags: dict[str, Any]) -> list[str]:
    """Return the command line of a valid run with changed flags."""
    given = {name: value for name, value in {**RUN, "device": "cpu", **flags}.items() if value is not NOTHING}
    return [word for name, value in given.items()
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


def run_json(changes: dict[str, Any]) -> str:
    """Return BASE with changes."""
    document = json.loads(json.dumps(BASE))
    for dotted, value in changes.items():
        change(document, dotted, value)
    return json.dumps(document, indent=1)


def input_cases() -> Iterator[Case]:
    """Yield the rows of WRONG."""
    for number, (changes, flags, culprit) in enumerate(WRONG):
        words = run_words({"deepspeed_config": "{world}/in.json", **flags})
        yield Case(f"check_config {number}: {culprit}", "check", tuple(words), culprit,
                   (("in.json", run_json(changes).encode()),))
