"""DeepSpeed JSONs from public repositories: accepted, with notes about ignored keys, or rejected with a reason.

And the JSONs of pretrain/pages/recipe.md.
"""

import dataclasses
import json
import re
from importlib.util import find_spec
from typing import Any

import pytest

from pretrain.config import run_rules
from pretrain.config.ds_json.read import DsFile
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.config.resolve import resolve_ds_config
from pretrain.config.run_rules import check_rules
from pretrain.distributed.device import Device
from pretrain.engine.parallelism import engine_config
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from tests.support.foreign_jsons import ForeignJson, read_foreign_jsons
from tests.support.launch import ROOT
from tests.support.rejection import rejection

FOREIGN = read_foreign_jsons()
CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)
MODEL = load_model_config("tiny")


def resolve(config: dict[str, Any], *, ranks: int = 1, **flags: Any) -> Plan:
    args = RunArguments(model="tiny", save="run", train_steps=20_000, seq_length=64)
    resolved = resolve_ds_config(DsFile("ds.json", config), dataclasses.replace(args, **flags), model=MODEL,
                                 world_size=ranks, device=CUDA)
    check_rules(resolved)
    return resolved


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an installed wandb: the expected outcomes do not depend on this machine."""
    monkeypatch.setattr(run_rules, "find_spec", lambda name: None if name == "wandb" else find_spec(name))


@pytest.mark.parametrize("foreign", [row for row in FOREIGN if row.notes is not None], ids=lambda row: row.source)
def test_accepted_by_this_program_and_by_deepspeed(foreign: ForeignJson) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    resolved = resolve(foreign.config, ranks=foreign.ranks, **foreign.flags)
    assert tuple(note.split(": ")[0] for note in resolved.notes) == foreign.notes
    config = json.loads(json.dumps(resolved.ds_config))
    assert '"auto"' not in json.dumps(config)
    config["train_batch_size"] //= resolved.layout.data_parallel_size  # DeepSpeed runs with one rank here
    own = DeepSpeedConfig(engine_config(config))
    assert own.zero_optimization_stage == resolved.layout.zero_stage
    assert own.optimizer_name == resolved.layout.optimizer


@pytest.mark.parametrize("foreign", [row for row in FOREIGN if row.notes is None], ids=lambda row: row.source)
def test_rejected_with_a_reason(foreign: ForeignJson) -> None:
    key, remedy = foreign.rejected
    caught = rejection(resolve, foreign.config, ranks=foreign.ranks, **foreign.flags)
    assert caught.startswith(f"ds.json: {key}: ")
    assert remedy in caught


def test_a_missing_optimizer_becomes_adamw_with_the_flags() -> None:
    base = {"train_batch_size": 8, "bf16": {"enabled": True}}
    resolved = resolve(base, learning_rate=1e-3, weight_decay=0.2, adam_beta1=0.8, adam_epsilon=1e-6)
    assert resolved.get("optimizer") == {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.95], "eps": 1e-6,
                                                                     "weight_decay": 0.2}}
    assert resolved.schedule.peak == 1e-3
    assert resolved.notes == ('the JSON has no "optimizer": AdamW with lr 0.001, betas [0.8, 0.95], eps 1e-06, '
                                    "weight_decay 0.2, from the flags and their defaults",)
    with pytest.raises(ConfigError, match="optimizer: the block is missing, and there is no --learning_rate"):
        resolve(base)


@pytest.mark.parametrize(("block", "compiles"), [
    ({"disable": False, "backend": "inductor"}, True), ({"enabled": True, "backend": "inductor", "kwargs": {}}, True),
    ({"backend": "inductor"}, True), ({"disable": True, "backend": "inductor"}, False),
    ({"enabled": False, "backend": "inductor"}, False), ({"deepcompile": False}, False), ({}, False),
])
def test_compile_of_earlier_versions_is_read_as_compile_blocks(block: dict[str, Any], compiles: bool) -> None:
    resolved = resolve({**ADAM, "compile": block})
    assert resolved.args.compile_blocks is compiles
    assert ("compile: read as --compile_blocks" in resolved.notes) is compiles
    assert "compile" not in resolved.ds_config


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_batch_size": 8}
IGNORED = [
    ({"_comment": "x", "//": "x", "$schema": "y", "_train_batch_size": 4}, "_comment, //, $schema, _train_batch_size"),
    ({"zero_optimization": {"stage": 1, "_why": "small", "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9}},
     "sub_group_size, stage3_max_live_parameters (zero_optimization): no effect at ZeRO stage 1"),
    ({"zero_optimization": {"stage": 3, "round_robin_gradients": True}}, "no effect at ZeRO stage 3"),
    ({"zero_optimization": {"stage": 2, "overlap_comm": "auto", "allgather_bucket_size": "auto"}}, "nothing fills"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto", "pin_memory": "auto"}}}, "nothing "),
    ({"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}, "elastic_checkpoint: no effect: checkpoints"),
    ({"fp16": {"enabled": False, "auto_cast": True, "initial_scale_power": "auto"}}, "fp16.auto_cast"),
    ({"amp": {"enabled": False}, "sparse_gradients": False}, "amp, sparse_gradients: off"),
    ({"aio": {"thread_count": 2}}, 'aio: no effect without "device": "nvme"'),
    ({"dataloader_drop_last": True}, "dataloader_drop_last: no effect: every batch"),
    ({"steps_per_print": 5, "zero_optimization": {"stage": 2}}, "steps_per_print: no effect"),
]


@pytest.mark.parametrize(("values", "note"), IGNORED, ids=lambda value: value if isinstance(value, str) else "")
def test_ignored_keys_are_noted_and_removed(values: dict[str, Any], note: str) -> None:
    resolved = resolve({**ADAM, **values})
    assert any(note in line for line in resolved.notes), resolved.notes
    plain = resolve({**ADAM, "zero_optimization": {"stage": resolved.layout.zero_stage}})
    for s in (resolved, plain):
        zero = s.ds_config.get("zero_optimization", {})
        s.ds_config["zero_optimization"] = {name: value for name, value in zero.items() if value not in ({}, 0)}
        for name in ("fp16", "steps_per_print"):
            s.ds_config.pop(name, None)
    assert resolved.ds_config == plain.ds_config


@pytest.mark.parametrize("values", [
    {"steps_per_print": float("inf")}, {"steps_per_print": "auto"}, {"steps_per_print": 10**16},
    {"wall_clock_breakdown": False}, {"comms_logger": {"enabled": False, "debug": True}},
    {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": True},
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    {"fp16": {"enabled": False, "min_loss_scale": 0, "loss_scale_window": 0}}, {"gradient_allreduce_op": "mean"},
])
def test_keys_that_request_nothing_get_no_note(values: dict[str, Any]) -> None:
    assert resolve({**ADAM, **values}).notes == ()


_RECIPES = re.findall(r"^```json\n(\{.*?)^```", (ROOT / "pretrain/pages/recipe.md").read_text(),
                      re.DOTALL | re.MULTILINE)


def test_the_jsons_of_the_page_on_recipes_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_rules, "find_spec", lambda name: name)  # bitsandbytes seems installed
    kinds = [resolve(json.loads(text), ranks=2, micro_batch_size=1, precision="bf16").layout.optimizer
             for text in _RECIPES]
    assert sorted(kinds) == ["lion", "muon"]
