"""Models that are built from transformers' modules have the properties of all others, on real DeepSpeed engines.

Equal losses in every layout, resumes with equal bits in the same layout and with equal losses in another one.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.errors import ConfigError
from pretrain.model import own_models
from pretrain.model.config import load_model_config
from pretrain.model.layer_specs import as_module
from pretrain.model.own_models import import_own_model
from pretrain.monitor.read_run_folder import newest_start, read_metrics
from tests.conftest import selected_params
from tests.extensions.wrapped import WORKERS
from tests.support.cases import CPU, case, config
from tests.support.launch import ROOT, run_worker, train_ranks
from tests.support.layouts import dp2, pp2, relative_difference
from tests.support.wrapped_models import WRAPPED_MODELS

TOLERANCE = 1e-6  # relative, fp32
SAVED, STEPS = 2, 4  # optimizer steps before the checkpoint, and in total
REFERENCE = (1, config(0, micro=8, accumulation=1), {})
# name -> (number of ranks, DeepSpeed JSON, flags); 8 samples a step
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero1": (2, dp2(1), {}), "zero2": (2, dp2(2), {}), "zero3": (2, dp2(3), {}),
    "zero3_offload": (2, dp2(3, offload_optimizer=CPU, offload_param=CPU), {}),
    "pipeline_zero0": (2, pp2(0), {}), "pipeline_zero1": (2, pp2(1), {}),
    "recompute": (2, dp2(2), {"recompute": "blocks"}), "pipeline_recompute": (2, pp2(1, checkpoint_every=1), {}),
}
# layouts of a usual run; the slow tests train the other ones
EXAMPLES = {"granite": ("pipeline_zero1", "zero3"), "opt": ("pipeline_zero1",),
            "deepseek_v3": ("pipeline_recompute",), "mamba2": ("zero2",), "gemma4_text": ("pipeline_recompute",)}
CASES = [pytest.param(name, layout, marks=() if layout in EXAMPLES.get(name, ()) else pytest.mark.slow)
         for name in WRAPPED_MODELS for layout in LAYOUTS]
# (model, layout that saved, layout that resumes)
RESUMES = [pytest.param("granite", "zero3", "zero3"), pytest.param("granite", "pipeline_zero1", "zero3"),
           pytest.param("deepseek_v3", "pipeline_recompute", "zero3_offload"),
           pytest.param("granite", "pipeline_zero1", "pipeline_zero1", marks=pytest.mark.slow)]
BIAS = "2.layer.mlp.gate.e_score_correction_bias"


def flags(model: Path, corpus: str, **others: Any) -> dict[str, Any]:
    return {"model": str(model), "train_data": corpus, "split": "1,0,0", "seq_length": 32, "train_steps": STEPS,
            "eval_steps": 1, **others}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train each model in the layouts of the selected tests, save, and resume in the same and in another layout.

    All cases of one number of ranks share a launch.
    """
    folder = tmp_path_factory.mktemp("general")
    selected = set(selected_params(request, "name", "layout"))
    resumes = selected_params(request, "model", "saved", "resumed")
    selected |= {(name, saved) for name, saved, _ in resumes}
    ones, twos = [], []
    for name, values in WRAPPED_MODELS.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    for name in dict.fromkeys(name for name, _ in sorted(selected)):
        path = folder / f"{name}.json"
        ones.append(case(f"{name}-reference", "train_and_save", REFERENCE[1], flags(path, corpus), saved_step=SAVED))
        for layout in (layout for other, layout in sorted(selected) if other == name):
            _, values, more = LAYOUTS[layout]
            twos.append(case(f"{name}-{layout}", "train_and_save", values, flags(path, corpus, **more),
                             saved_step=SAVED))
    for name, saved, resumed in resumes:
        _, values, more = LAYOUTS[resumed]
        twos.append(case(f"{name}-{saved}-{resumed}", "resume", values, flags(folder / f"{name}.json", corpus, **more),
                         saved_step=SAVED, source=f"run-{name}-{saved}/checkpoints/global_step{SAVED}"))
    states = flags(folder / "deepseek_v3.json", corpus)
    ones.append(case("state-one", "state", REFERENCE[1], states, add=1.0))
    twos += [case("state-pipeline", "state", pp2(1), states, source="../1/run-state-one/checkpoints/global_step0"),
             case("state-zero3", "state", dp2(3), states),
             case("state-bf16", "state", dp2(3, precision="bf16"), states)]
    return {**run_worker(str(WORKERS / "wrapped_worker.py"), ones, 1, folder / "1"),
            **run_worker(str(WORKERS / "wrapped_worker.py"), twos, 2, folder / "2")}


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of the user's, which is the current one; this process has not imported the module."""
    shutil.copy(ROOT / "tests" / "support" / "own_model.py", tmp_path / "my_model.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(own_models, "_own_models", {})
    return tmp_path


def test_a_model_of_the_users_code_trains_resumes_in_another_layout_and_is_exported(own_code: Path,
                                                                                     corpus: str) -> None:
    """No record of the run makes a program import the code: each needs the flag."""
    def train(ranks: int, values: dict[str, Any], **changes: Any) -> None:
        (own_code / "ds.json").write_text(json.dumps(values))
        words = {"deepspeed_config": "ds.json", "train_data": corpus, "split": "1,0,0", "seq_length": 32,
                 "train_steps": 6, "save_interval": 3, "save": "run", "log_interval": 1, **changes}
        done = train_ranks(ranks, [f"--{name}={value}" for name, value in words.items()], own_code)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stdout

    train(2, pp2(1), model="my_model:MyConfig", model_overrides="num_hidden_layers=2", exit_step=3)
    train(1, config(3, micro=4, accumulation=2), model_code="my_model:MyConfig")
    steps = [row["step"] for row in read_metrics(own_code / "run") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5, 6]

    with pytest.raises(ConfigError, match="--model_code my_model:MyConfig names your own code for this model_type"):
        plan_export(own_code / "run", own_code / "out")
    import_own_model("", "my_model:MyConfig")
    export_hf(plan_export(own_code / "run", own_code / "out"))
    own = own_models.own_model("my_decoder")
    assert own is not None
    exported = own.model_class.from_pretrained(own_code / "out")
    assert exported.config.num_hidden_layers == 2
    ours = as_module(load_model_config(str(own_code / "out")))
    ours.load_state_dict(CheckpointReader(own_code / "run" / "checkpoints" / "global_step6").weights())
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(ours(tokens), exported(tokens).logits, atol=1e-5, rtol=0)
    assert newest_start(own_code / "run")["flags"]["model_code"] == "my_model:MyConfig"


def losses(row: dict[str, Any]) -> list[float]:
    return [*row["before"]["loss"], *row["after"]["loss"]]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_losses_are_equal_in_every_layout(name: str, layout: str, trained: dict[str, Any]) -> None:
    expected = losses(trained[f"{name}-reference"])
    assert relative_difference(losses(trained[f"{name}-{layout}"]), expected) <= TOLERANCE


@pytest.mark.parametrize(("model", "saved", "resumed"), RESUMES)
def test_resumes_have_equal_bits_in_the_same_layout_and_equal_losses_in_another_one(
        model: str, saved: str, resumed: str, trained: dict[str, Any]) -> None:
    expected = trained[f"{model}-{saved}"]["after"]["loss"]
    found = trained[f"{model}-{saved}-{resumed}"]["after"]["loss"]
    if saved == resumed:
        assert found == expected
    assert relative_difference(found, expected) <= TOLERANCE


def test_initial_weights_are_equal_in_every_layout(trained: dict[str, Any]) -> None:
    """Also after a resume in another layout; in bf16 they are rounded."""
    expected = trained["state-one"]["sums"]
    assert len(expected) > 20
    assert trained["state-zero3"]["sums"] == trained["state-pipeline"]["sums"] == expected
    assert trained["state-bf16"]["sums"] == pytest.approx(expected, rel=1e-2)


def test_buffers_are_in_checkpoints_and_keep_their_dtype(trained: dict[str, Any]) -> None:
    """A changed bias of a router comes back in another layout. In 16-bit, biases and rotary frequencies are fp32."""
    assert trained["state-zero3"]["buffers"][BIAS] == [0.0] * 4
    assert trained["state-one"]["buffers"][BIAS] == trained["state-pipeline"]["buffers"][BIAS] == [0.0, 1.0, 2.0, 3.0]
    assert {"torch.float32"} == {*trained["state-bf16"]["dtypes"].values()}


def test_exports_load_in_transformers_with_equal_logits(trained: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(trained["state-pipeline"]["folder"])
    export_hf(plan_export(folder, tmp_path / "out"))
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    bias = exported.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.tolist() == [0.0, 1.0, 2.0, 3.0]
    ours = as_module(load_model_config(str(tmp_path / "out"))).eval()
    reader, tokens = CheckpointReader(folder), torch.arange(24).view(2, 12)
    ours.load_state_dict({**reader.weights(), **reader.buffers()})
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), exported.eval()(tokens).logits, atol=1e-5, rtol=0)
