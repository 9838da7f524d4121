"""Wrong values of the flag: see tests/wrong_inputs/inputs.py."""

from typing import Any

from tests.wrong_inputs.case import NOTHING

WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"bf16": NOTHING}, {"fp8": "rowwise"}, "--fp8: found a run in fp32; expected bf16"),
    ({"tensor_parallel": {"autotp_size": 2}}, {"world_size": 2, "fp8": "rowwise"},
     '--fp8: found "tensor_parallel.autotp_size": 2; expected 1'),
    ({}, {"fp8": "rowwise", "plain_operators": True}, "--fp8: --plain_operators computes"),
    ({}, {"model": "tiny-moe", "fp8": "rowwise"}, "--fp8: found a model with experts"),
    ({}, {"fp8": "rowwise", "model_overrides": "n_embd=72,n_inner=64"}, "--fp8: the hidden size is 72"),
    ({}, {"fp8": "rowwise", "mlp_tiles": 8, "micro_batch_size": 1}, "--fp8: the micro-batch of 1 x 64 tokens"),
    ({"fp8": {"enabled": True}}, {}, "--fp8 is a flag of the run, and no key of DeepSpeed"),
]
