"""The record of one start in run.json: everything that another engineer needs to repeat it."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.config.validate import Plan
from pretrain.data.data_spec import absolute_words
from pretrain.data.tokenizers.tokenizer import absolute_tokenizer
from pretrain.engine.layer_times import layer_times_record
from pretrain.model.kernels.cpu.choice import chosen
from pretrain.monitor.environment import code_record, command, environment_variables, software, versions
from pretrain.monitor.environment import without_credentials as plain

_DATA_FLAGS = ("train_data", "valid_data", "test_data")


def run_record(plan: Plan, hosts: Sequence[dict[str, Any]], *, first_step: int,
               resumed_from: Path | None) -> dict[str, Any]:
    """Return the record of one start: everything that the result of the run depends on.

    Args:
        hosts: `host_record` of each rank's host, in rank order.
        first_step: number of steps that were done before this start.
        resumed_from: checkpoint that the start continues from.
    """
    layout, code, kernels = plan.layout, code_record(Path(plan.args.save)), chosen()
    ranks = Counter(host["host"] for host in hosts)
    different_hosts = {host["host"]: host for host in hosts}.values()
    return {
        "time": time.time(), "first_step": first_step,
        "command": command(), "environment": environment_variables(os.environ),
        "flags": _flags(plan),
        "deepspeed_config": plan.ds_config, "given_deepspeed_config": plan.given_config,
        "schedule": asdict(plan.schedule) if plan.schedule else None,
        "origin": asdict(plan.origin) if plan.origin else None,
        "resumed_from": None if resumed_from is None else str(resumed_from.absolute()),
        "lineage": list(plan.lineage), "overrides": list(plan.overrides),
        "model_config": plan.model.hf_config, "num_parameters": plan.model.num_parameters(),
        **({"active_parameters": plan.model.num_parameters(active=True)} if plan.model.num_experts else {}),
        "train_steps": plan.train_steps, "seed": plan.args.seed,
        "layout": {"world_size": layout.world_size, "data_parallel_size": layout.data_parallel_size,
                   "pipeline_stages": layout.pipeline_stages, "tensor_parallel_size": layout.tensor_parallel_size,
                   "sequence_parallel_size": layout.sequence_parallel_size,
                   "expert_parallel_size": layout.expert_parallel_size, "zero_stage": layout.zero_stage,
                   "precision": layout.precision},
        "batch": {"micro_batch_size": layout.micro_batch_size,
                  "gradient_accumulation_steps": layout.gradient_accumulation_steps,
                  "global_batch_size": layout.global_batch_size},
        "data": {name: dataset.fingerprint for name, dataset in plan.datasets.items()},
        "tokenizer": plan.tokenizer.fingerprint if plan.tokenizer else None,
        "layer_times": layer_times_record(plan),
        "cpu_kernels": asdict(kernels) if kernels else None,
        "versions": versions(), "software": software(), "git_commit": code["commit"], "code": code,
        "hosts": sorted(ranks),
        "hardware": [{**host, "ranks": ranks[host["host"]]} for host in different_hosts],
    }


def _flags(plan: Plan) -> dict[str, Any]:
    """Return all flags, with absolute paths of data and tokenizer: tools read these files in any working directory."""
    args = plan.args
    flags = {**asdict(args), "tokenizer": args.tokenizer and absolute_tokenizer(args.tokenizer),
             **{name: absolute_words(getattr(args, name)) for name in _DATA_FLAGS}}
    return {name: plain(value) if isinstance(value, str) else value for name, value in flags.items()}
