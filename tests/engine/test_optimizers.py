"""Optimizers on real engines: the same losses in every layout, and which parameters Muon updates, and how."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config.ds_json.optimizers import OPTIMIZERS
from pretrain.config.layout import parse_layout
from pretrain.engine.patches.optimizers import convert_steps
from pretrain.memory.estimate.rank import ParameterGroup, eight_bit_state_bytes, optimizer_states
from tests.support.cases import CPU, case, flags
from tests.support.layouts import dp2, pp2, relative_difference, run_layouts

STEPS = 4
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "NAdam": {"lr": 1e-3},
    "RMSprop": {"lr": 1e-3, "momentum": 0.5}, "Adamax": {"lr": 1e-3}, "RAdam": {"lr": 1e-3}, "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1}, "Rprop": {"lr": 1e-3}}
LAYOUTS = {"zero0": dp2(0), "zero1": dp2(1), "zero2": dp2(2), "zero3": dp2(3), "pipeline2_zero1": pp2(1)}
MUON_LAYOUTS = {"zero1": dp2(1), "zero2": dp2(2), "zero3": dp2(3, reduce_scatter=False), "pipeline2_zero1": pp2(1),
                "zero2_cpu": dp2(2, offload_optimizer=CPU), "pipeline2_cpu": pp2(1, offload_optimizer=CPU),
                "zero3_cpu": dp2(3, reduce_scatter=False, offload_optimizer=CPU)}
MUON = {"lr": 0.02, "adam_lr": 0.002, "momentum": 0.95, "weight_decay": 0.1, "betas": [0.9, 0.95]}


def _case(name: str, values: dict[str, Any], kind: str, params: dict[str, Any], corpus: str, *, clip: float = 0.5,
          **others: Any) -> tuple[int, dict[str, Any]]:
    values = {**values, "optimizer": {"type": kind, "params": params}, "gradient_clipping": clip}
    run_flags = {**flags(corpus, seq_length=32, steps=STEPS), "lr_schedule": "constant", "lr_warmup_steps": 0}
    return 2, case(name, "updates", values, run_flags, **others)


@pytest.mark.parametrize("kind", [
    "SGD", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ELEMENTWISE if kind != "SGD")])
def test_elementwise_optimizers_of_torch_are_the_same_in_every_layout(kind: str, corpus: str, tmp_path: Path) -> None:
    cases = {name: _case(name, values, kind, ELEMENTWISE[kind], corpus) for name, values in LAYOUTS.items()
             if kind == "SGD" or name in ("zero0", "zero3")}
    results = run_layouts(cases, tmp_path)
    for name in cases:
        assert relative_difference(results[name]["loss"], results["zero0"]["loss"]) < 2e-6, name
        assert min(results[name]["changes"].values()) > 0, name


@pytest.fixture(scope="module")
def muon(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = {name: _case(name, values, "Muon", MUON, corpus) for name, values in MUON_LAYOUTS.items()}
    for stage in ("zero1", "zero3"):
        cases[f"{stage}-unclipped"] = _case(f"{stage}-unclipped", MUON_LAYOUTS[stage], "Muon", MUON, corpus, clip=0.0)
    return run_layouts(cases, tmp_path_factory.mktemp("muon"))


def test_muon_updates_the_matrices_of_blocks_in_every_layout(muon: dict[str, Any], subtests: pytest.Subtests) -> None:
    """Matrices change by orthogonal updates, whose size depends on their shapes only; all others by Adam's."""
    for name in MUON_LAYOUTS:
        with subtests.test(name):
            result = muon[name]
            assert result["muon"] == sorted(key for key in result["changes"] if key.endswith("weight") and (
                ".attention." in key or ".mlp." in key))
            assert len(result["muon"]) == 4 * 4
            for parameter in result["muon"]:
                rows, columns = {"qkv": (192, 64), "out": (64, 64), "up": (256, 64), "down": (64, 256)}[
                    parameter.split(".")[2]]
                size = 0.02 * max(1, rows / columns) ** 0.5 * min(rows, columns) ** 0.5  # of an orthogonal update
                assert 0.6 < result["changes"][parameter] / size < 1.3, parameter
            assert result["changes"]["tied_modules.embed.embedding"] < 0.002 * (256 * 64) ** 0.5 * 1.1
            assert relative_difference(result["loss"], muon["zero2"]["loss"]) < 1e-4
            assert relative_difference(result["grad_norm"], muon["zero2"]["grad_norm"]) < 1e-3


def test_q_clipping_does_not_slow_muon_down(muon: dict[str, Any], subtests: pytest.Subtests) -> None:
    for stage in ("zero1", "zero3"):
        with subtests.test(stage):
            ratios = [muon[stage]["changes"][name] / muon[f"{stage}-unclipped"]["changes"][name]
                      for name in muon[stage]["muon"]]
            assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios


def test_muons_adam_reads_the_states_of_its_other_implementation() -> None:
    """On a GPU without a fitting nvcc, Muon's Adam is torch's; the checkpoint may be one of FusedAdam."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    adam = torch.optim.AdamW([weight])
    adam.state[weight] = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    adam.register_step_pre_hook(convert_steps)
    adam.step()
    assert adam.state[weight]["step"] == torch.tensor(4.0)
    other = torch.optim.SGD([weight])  # FusedAdam, too, is no Adam of torch, and counts by a number
    other.state[weight] = dict(adam.state[weight])
    convert_steps(other)
    step = other.state[weight]["step"]
    assert (type(step), step) == (int, 4)


def test_8_bit_adamw_with_a_mock_of_its_package(corpus: str, tmp_path: Path) -> None:
    """The package needs CUDA. torch's AdamW stands in for its class, so losses must equal AdamW's.

    This tests how the class is called, saved and loaded, and nothing of the 8-bit kernels.
    """
    params = {"lr": 1e-3, "weight_decay": 0.1}
    layouts = {name: LAYOUTS[name] for name in ("zero2", "zero3")}
    cases = {name: _case(name, values, "AdamW", {**params, "torch_adam": True}, corpus) for name, values in
             layouts.items()}
    for name in layouts:
        ranks, same = _case(f"{name}-8bit", layouts[name], "AdamW", params, corpus)
        cases[f"{name}-8bit"] = (ranks, {**same, "job": "eight_bit"})
    results = run_layouts(cases, tmp_path)
    for name in layouts:
        found = results[f"{name}-8bit"]
        assert found["optimizer"].endswith("/AdamW8bit")
        assert found["again"] == found["loss"]
        assert relative_difference(found["loss"], results[name]["loss"][2:]) < 1e-6


def test_the_states_of_each_optimizer_of_torch_are_counted(subtests: pytest.Subtests) -> None:
    """In the predicted memory, for a flat tensor, with each parameter that adds a state and without."""
    for row in (row for row in OPTIMIZERS.values() if row.from_torch):
        switches = [name for name in ("momentum", "centered", "nesterov") if name in row.params]
        for chosen in itertools.product((False, True), repeat=len(switches)):
            given: dict[str, Any] = {name: 0.9 if name == "momentum" else True
                                     for name, is_given in zip(switches, chosen, strict=True) if is_given}
            if given.get("nesterov") and "momentum" not in given:
                continue
            with subtests.test(row.name, given=sorted(given)):
                weight = torch.nn.Parameter(torch.ones(100))
                weight.grad = torch.ones(100)
                optimizer = getattr(torch.optim, row.name)([weight], lr=1e-3, **given)
                optimizer.step()
                states = sum(value.dim() > 0 for value in optimizer.state[weight].values() if torch.is_tensor(value))
                layout = parse_layout({"train_batch_size": 1, "optimizer": {"type": row.name, "params": given}},
                                      world_size=1, seq_length=64, device_kind="cpu")
                assert layout.optimizer_moments == states


def test_memory_of_8_bit_states() -> None:
    """bitsandbytes keeps a byte for each element of a state, and an fp32 maximum for each block of 256 elements."""
    assert eight_bit_state_bytes(1_000_000) == 2 * (1_000_000 + 4 * 3907)
    assert eight_bit_state_bytes(4095) == 8 * 4095
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 0}}
    states = {}
    for kind in ("AdamW", "AdamW8bit"):
        layout = parse_layout({**config, "optimizer": {"type": kind}}, world_size=1, seq_length=64, device_kind="cuda")
        group = ParameterGroup(sizes=(1_000_000,), ranks=1)
        states[kind] = sum(size for _, size in optimizer_states(group, group.size, layout))
    assert states == {"AdamW": 8_000_000, "AdamW8bit": eight_bit_state_bytes(1_000_000)}
