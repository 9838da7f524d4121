"""Megatron Core's model, optimizer and dist_checkpointing on CPUs: `python megatron_core_run.py CASE.json LOSSES.json`.

megatron-core 0.16 must be installed. It expects GPUs: tensors for them are made on the CPU here. The loop around it is
Megatron-LM's order of calls (pretrain_gpt.py is not a part of the package), with the arguments that Megatron-LM stores.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional


def without_gpus() -> None:
    """Make Megatron Core use CPUs."""
    cpu, name_of = torch.device("cpu"), torch.Tensor.type

    def with_cuda_in_name(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        name = name_of(tensor, *arguments, **settings)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **settings: make(*arguments, **{
            **settings, **({"device": cpu} if "device" in settings else {})})

    torch.Tensor.type = with_cuda_in_name
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    for name in ("tensor", "empty", "zeros", "ones"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: cpu
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.nvtx = SimpleNamespace(range_push=lambda *_: None, range_pop=lambda *_: None)
    for name in ("synchronize", "manual_seed", "set_rng_state"):
        setattr(torch.cuda, name, doing_nothing())
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    for name in ("default_stream", "current_stream"):
        setattr(torch.cuda, name, doing_nothing(SimpleNamespace(wait_stream=lambda stream: None)))


def doing_nothing(result: Any = None) -> Callable[..., Any]:
    """Return a new function: torch's compiler rejects one that has two names."""
    return lambda *_, **__: result


def stored_arguments(case: dict[str, Any], tensor_parallel: int) -> argparse.Namespace:
    """Return the arguments as Megatron-LM stores them."""
    model = case["model"]
    half = case["precision"] == "bf16"
    return argparse.Namespace(
        num_layers=model["num_hidden_layers"], hidden_size=model["hidden_size"], group_query_attention=True,
        num_attention_heads=model["num_attention_heads"], num_query_groups=model["num_key_value_heads"],
        ffn_hidden_size=model["intermediate_size"], swiglu=True, normalization="RMSNorm", add_bias_linear=False,
        norm_epsilon=model["rms_norm_eps"], position_embedding_type="rope", rotary_base=model["rope_theta"],
        rotary_percent=1.0, kv_channels=model["head_dim"], qk_layernorm=model["model_type"] == "qwen3",
        untie_embeddings_and_output_weights=not model["tie_word_embeddings"], seq_length=case["seq_length"],
        max_position_embeddings=model["max_position_embeddings"], global_batch_size=case["batch"], optimizer="adam",
        consumed_train_samples=0, seed=1,
        clip_grad=case["clipping"], tensor_model_parallel_size=tensor_parallel, pipeline_model_parallel_size=1,
        bf16=half, fp16=False, params_dtype=torch.bfloat16 if half else torch.float32, num_experts=None,
        hidden_dropout=0.0, attention_dropout=0.0, use_distributed_optimizer=case["distributed"])


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    without_gpus()
    dist.init_process_group("gloo")
    import megatron.core.tensor_parallel.random as random_states
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel.initialize_model_parallel(tensor_model_parallel_size=case["tensor_parallel"])
    random_states.initialize_rng_tracker()
    random_states._set_cuda_rng_state = lambda *_, **__: None
    random_states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random_states.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    args = stored_arguments(case, case["tensor_parallel"])
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups, ffn_hidden_size=args.ffn_hidden_size, kv_channels=args.kv_channels,
        gated_linear_unit=True, activation_func=functional.silu, add_bias_linear=False, normalization="RMSNorm",
        layernorm_epsilon=args.norm_epsilon, hidden_dropout=0, attention_dropout=0, use_cpu_initialization=True,
        tensor_model_parallel_size=args.tensor_model_parallel_size, bf16=args.bf16, params_dtype=args.params_dtype,
        bias_activation_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, pipeline_dtype=torch.float32, attention_softmax_in_fp32=True,
        persist_layer_norm=False, qk_layernorm=args.qk_layernorm)
    model = GPTModel(config, get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization="RMSNorm"),
                     vocab_size=case["model"]["vocab_size"], max_sequence_length=args.max_position_embeddings,
                     position_embedding_type="rope", rotary_base=args.rotary_base,
                     share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights)
    model = model.bfloat16() if args.bf16 else model
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=case["rate"], min_lr=0.0, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8,
        bf16=args.bf16, use_distributed_optimizer=args.use_distributed_optimizer, clip_grad=case["clipping"],
        params_dtype=args.params_dtype), [wrapped])
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=case["rate"], min_lr=0.0, lr_warmup_steps=case["warmup"] * case["batch"],
        lr_decay_steps=case["steps"] * case["batch"], lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
        wd_incr_steps=case["steps"] * case["batch"], wd_incr_style="constant")
    rows = torch.from_numpy(np.load(case["samples"]).astype(np.int64))
    ranks, rank, losses = parallel.get_data_parallel_world_size(), parallel.get_data_parallel_rank(), []
    for step in range(1, case["steps"] + 1):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        own = rows[(step - 1) * case["batch"]:step * case["batch"]].chunk(ranks)[rank]
        length = own.shape[1] - 1
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        loss = wrapped(own[:, :-1].contiguous(), torch.arange(length).expand(len(own), length), mask,
                       labels=own[:, 1:].contiguous()).float().mean()
        loss.backward()
        finalize_model_grads([wrapped])
        optimizer.step()
        schedule.step(case["batch"])
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel.get_data_parallel_group())
        losses.append(total.item() / ranks)
        if step == case["save_at"]:
            facts = {"distrib_optim_sharding_type": case["format"], "singleton_local_shards": False,
                     "chained_optim_avoid_prefix": True}
            with_group = {**facts, "dp_cp_group": parallel.get_data_parallel_group(with_context_parallel=True)}
            args.consumed_train_samples, args.iteration = step * case["batch"], step
            state = {"args": args, "checkpoint_version": 3.0, "iteration": step,
                     "model": model.sharded_state_dict(metadata=with_group),
                     "opt_param_scheduler": schedule.state_dict()}
            state["optimizer"] = optimizer.sharded_state_dict(state, metadata=with_group)
            folder = Path(case["name"]) / f"iter_{step:07d}"
            folder.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=facts)
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[2]).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
