"""Universal checkpoints with faults, and in several forms: each fault is one line that names the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import SubparamShape
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.deepspeed.universal import read
from pretrain.extensions.adopt.foreign_run import ForeignRun
from tests.extensions.adopt.foreign import foreign_states
from tests.support.model_shapes import SHAPES

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
MODEL_STATES = "mp_rank_00_model_states.pt"


def write_universal(folder: Path, name: str = "llama") -> dict[str, dict[str, torch.Tensor]]:
    """Write random states as ds_to_universal does for ZeRO-1. Return them by state and name."""
    states = foreign_states(folder, SHAPES[name])
    for state, tensors in states.items():
        for parameter, tensor in tensors.items():
            save(folder, parameter, state, {"param": tensor.clone(), "cat_dim": 0})
            save(folder, parameter, "step", torch.tensor(6.0))
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}
    torch.save({"param_groups": [group], "ds_version": "0.19.8"}, folder / "zero/optimizer_state.pt")
    torch.save({"global_steps": 6, "global_samples": 48, "skipped_steps": 0, "dp_world_size": 2, "lr_scheduler": None,
                "ds_config": {"optimizer": {"type": "AdamW"}}}, folder / MODEL_STATES)
    return states


def save(folder: Path, name: str, state: str, value: Any) -> None:
    path = folder / "zero" / name / f"{state}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def load(folder: Path, **config: Any) -> ForeignRun:
    return read(folder, {**json.loads((folder / "config.json").read_text()), **config})


def change(folder: Path, name: str, **values: Any) -> None:
    """Change keys of the dict in a file; None removes a key."""
    found = {**torch.load(folder / name, weights_only=False), **values}
    torch.save({key: value for key, value in found.items() if value is not None}, folder / name)


@pytest.mark.parametrize("wrapped", ["flat", "bare", "wrapped_model", "sub_params"])
def test_every_form_is_read(wrapped: str, tmp_path: Path) -> None:
    """ZeRO-3 has flat tensors; other tools no dict; a model may be a part of another; sub-parameters have a class."""
    states = write_universal(tmp_path)
    for name in states["fp32"] if wrapped == "wrapped_model" else ():
        (tmp_path / "zero" / name).rename(tmp_path / "zero" / f"module.inner.{name}")
    for state, tensors in states.items() if wrapped != "wrapped_model" else ():
        for name, tensor in tensors.items():
            shape = SubparamShape(patterns=[name], shape=(tuple(tensor.shape), -1), partition_dim=0)
            values = {"flat": tensor.reshape(-1).clone(), "bare": tensor.clone(),
                      "sub_params": {"param": tensor.view(1, -1).clone(), "sub_param_shape": shape}}
            save(tmp_path, name, state, values[wrapped])
    run = load(tmp_path)
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            assert torch.equal(run.read(name, state), tensor)
    assert (run.step, run.optimizer_step, run.global_batch_size, run.consumed_samples) == (6, 6, 8, 48)
    assert run.weight_decay == dict.fromkeys(run.shapes, 0.1)


@pytest.mark.parametrize("name", ["neox_parallel", "neox_tied_no_bias", "bloom", "gptj", "mixtral", "qwen2_moe"])
def test_families(name: str, tmp_path: Path) -> None:
    states = write_universal(tmp_path, name)
    run = load(tmp_path)
    assert run.shapes == {parameter: tuple(tensor.shape) for parameter, tensor in states["fp32"].items()}
    assert all(torch.equal(run.read(parameter, state), tensor)
               for state, tensors in states.items() for parameter, tensor in tensors.items())


def test_a_copy_of_a_tied_head(tmp_path: Path) -> None:
    """ds_to_universal writes the module's head, in the precision of the module, next to the embedding's fp32."""
    states = write_universal(tmp_path, "llama_tied_llama3_rope")
    assert "lm_head.weight" not in states["fp32"]
    save(tmp_path, "lm_head.weight", "fp32", {"param": states["fp32"][EMBEDDING].bfloat16().float()})
    assert "lm_head.weight" not in load(tmp_path).shapes
    save(tmp_path, "lm_head.weight", "fp32", {"param": states["fp32"][EMBEDDING] + 1e-3})
    with pytest.raises(ConfigError, match=r"lm_head.weight/fp32.pt: it differs from model.embed_tokens.weight"):
        load(tmp_path)


def test_the_loss_scale_of_fp16(tmp_path: Path) -> None:
    write_universal(tmp_path)
    change(tmp_path, MODEL_STATES, ds_config={"optimizer": {"type": "AdamW"}, "fp16": {"enabled": True}},
           skipped_steps=2)
    assert load(tmp_path).loss_scale is None  # plan_adoption reports it
    change(tmp_path, "zero/optimizer_state.pt", loss_scaler=DynamicLossScaler(
        init_scale=512.0, scale_window=4, min_scale=1, delayed_shift=2, consecutive_hysteresis=False))
    run = load(tmp_path)
    assert (run.precision, run.step, run.skipped_steps) == ("fp16", 6, 2)
    assert run.loss_scale == {"cur_scale": 512.0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2}


def test_parameters_without_states_are_a_loss(tmp_path: Path) -> None:
    """ds_to_universal writes only the weights of parameters that were not trained."""
    states = write_universal(tmp_path)
    for state in ("exp_avg", "exp_avg_sq", "step"):
        (tmp_path / "zero" / NORM / f"{state}.pt").unlink()
    run = load(tmp_path)
    assert [omission.name for omission in run.omissions] == ["other_states"]
    assert run.omissions[0].reason.startswith("model.norm.weight has no optimizer states")
    assert torch.equal(run.read(NORM, "fp32"), states["fp32"][NORM])
    assert not run.read(NORM, "exp_avg").any()
    assert all(path.is_file() for path in run.files)


class Runs:
    """A pickle that would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def hostile(folder: Path, name: str) -> None:
    torch.save({"param": Runs(folder / "ran")}, folder / name)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tensors": (lambda folder: [path.unlink() for path in folder.glob("zero/*/fp32.pt")], "there is no zero/NAME/"),
    "missing parameter": (lambda folder: (folder / "zero" / NORM / "fp32.pt").unlink(),
                          "zero: model.norm.weight: the model of the config.json has this parameter"),
    "unknown parameter": (lambda folder: save(folder, "extra", "fp32", torch.zeros(3)),
                          "zero: extra: the checkpoint has this parameter, and the model of the config.json does not"),
    "names of Megatron": (lambda folder: save(folder, "2.attention.query_key_value.weight", "fp32", torch.zeros(3)),
                          "this is a name of Megatron or GPT-NeoX"),
    "missing state": (lambda folder: (folder / "zero" / NORM / "exp_avg.pt").unlink(),
                      "model.norm.weight/exp_avg.pt: this file is missing"),
    "other shape": (lambda folder: save(folder, NORM, "fp32", torch.zeros(7)),
                    r"model.norm.weight/fp32.pt: found a tensor of shape \[7\]; expected \[48\]"),
    "other vocabulary": (lambda folder: save(folder, EMBEDDING, "fp32", torch.zeros(99, 48)),
                         r"found 99 rows; expected vocab_size of the config.json \(97\). Set vocab_size to 99"),
    "no tensor": (lambda folder: save(folder, NORM, "fp32", {"param": "text"}), "it holds no tensor of floating-point"),
    "integers": (lambda folder: save(folder, NORM, "fp32", torch.zeros(48, dtype=torch.long)), "it holds no tensor"),
    "damaged": (lambda folder: os.truncate(folder / "zero" / NORM / "fp32.pt", 300),
                "model.norm.weight/fp32.pt: found an unreadable file"),
    "hostile tensor": (lambda folder: hostile(folder, f"zero/{NORM}/fp32.pt"), "fp32.pt: found a pickle that needs"),
    "hostile states": (lambda folder: hostile(folder, MODEL_STATES), "model_states.pt: found a pickle that needs"),
    "hostile optimizer": (lambda folder: hostile(folder, "zero/optimizer_state.pt"), "found a pickle that needs"),
    "no model states": (lambda folder: (folder / MODEL_STATES).unlink(), "there is neither mp_rank_00_model"),
    "no optimizer state": (lambda folder: (folder / "zero/optimizer_state.pt").unlink(), "this file is missing"),
    "no groups": (lambda folder: change(folder, "zero/optimizer_state.pt", param_groups=[]),
                  "param_groups: it is not a list of parameter groups with a learning rate"),
    "unknown optimizer": (lambda folder: change(folder, MODEL_STATES, ds_config={"optimizer": {"type": "Lamb"}}),
                          "its optimizer is not one that can be continued here"),
    "a list": (lambda folder: torch.save([1], folder / MODEL_STATES), "found list; expected a dict"),
    "no step": (lambda folder: change(folder, MODEL_STATES, global_steps=None), "global_steps: found nothing"),
    "text as step": (lambda folder: change(folder, MODEL_STATES, global_steps="6"), "global_steps: found '6'"),
    "other steps": (lambda folder: save(folder, NORM, "step", torch.tensor(7.0)),
                    "step.pt: found 7.0; expected 6, as other parameters have"),
    "no count": (lambda folder: [path.unlink() for path in folder.glob("zero/*/step.pt")],
                 "zero: the optimizer's step count is missing"),
    "text as count": (lambda folder: save(folder, NORM, "step", "six"), "step.pt: it holds no number"),
}


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undamaged")
    write_universal(folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(fault: str, undamaged: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(undamaged, tmp_path / "copy"))
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(ConfigError, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    assert not (folder / "ran").exists()


def test_the_model_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model: it is missing, and .* has no config.json"):
        read(tmp_path, None)
