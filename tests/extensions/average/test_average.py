"""Averages of checkpoints: equal to torch's, over layouts; what reads them; and what is rejected."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import model_card, plan_export
from pretrain.checkpoint.format.manifest import MANIFEST
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.format.verify import damage_of
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint
from pretrain.checkpoint.load.hf_folder import check_hf_folder
from pretrain.checkpoint.load.init_from import find_initial_weights
from pretrain.checkpoint.load.reader import CheckpointReader, HFWeights
from pretrain.errors import ConfigError
from pretrain.extensions.average.average import average
from pretrain.extensions.average.main import plan_average
from tests.support.cases import case, flags
from tests.support.checkpoints import copy_checkpoints, real_run
from tests.support.conversion_faults import run_tool
from tests.support.layouts import dp2, run_layouts


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with the steps 1 and 2 of one rank layout and step 3 of a pipeline; tests do not change it.

    The model has tied embeddings, which both pipeline stages hold.
    """
    folder = tmp_path_factory.mktemp("average") / "run"
    folder.mkdir()
    checkpoints = copy_checkpoints(real_run("zero1", corpus, tmp_path_factory), folder / "checkpoints")
    shutil.rmtree(checkpoints / "global_step3")
    shutil.copytree(real_run("pipeline2", corpus, tmp_path_factory) / "checkpoints" / "global_step3",
                    checkpoints / "global_step3")
    return folder


def _copy(run: Path, tmp_path: Path) -> Path:
    copy_checkpoints(run, tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def _averaged(run: Path, out: Path, **how: Any) -> dict[str, torch.Tensor]:
    average(plan_average(run, out, **how))
    folder, manifest, _ = find_checkpoint(out)
    assert manifest.weights_only
    assert damage_of(folder, manifest) == []
    return CheckpointReader(folder).weights()


HOW: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "equal weights": ({"steps": [1, 2, 3]}, (1 / 3, 1 / 3, 1 / 3)),
    "the last two": ({"last": 2}, (0, 1 / 2, 1 / 2)),
    "weights in the order of the steps": ({"steps": [3, 1], "weights": [3, 1]}, (1 / 4, 0, 3 / 4)),
    "the newest has the largest weight": ({"last": 3, "ema": 0.5}, (1 / 7, 2 / 7, 4 / 7)),
}


@pytest.mark.parametrize("name", HOW)
def test_averages_equal_those_of_torch_over_layouts(name: str, run: Path, tmp_path: Path) -> None:
    how, weights = HOW[name]
    found = _averaged(run, tmp_path / "out", **how)
    sources = [CheckpointReader(run / "checkpoints" / f"global_step{step}").weights() for step in (1, 2, 3)]
    assert found.keys() == sources[0].keys() == sources[2].keys()
    assert sum(name.endswith("embed.embedding") for name in found) == 1
    for parameter, value in found.items():
        expected = sum(weight * source[parameter].double() for weight, source in zip(weights, sources, strict=True))
        torch.testing.assert_close(value.double(), expected, rtol=2**-24, atol=0)  # half of a unit of the last bit
        assert not torch.equal(value, sources[2][parameter])


def test_the_manifest_names_its_sources_and_other_programs_read_the_average(
        run: Path, corpus: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path / "out"
    weights = _averaged(run, out, last=3)
    manifest = read_manifest(out / "checkpoints" / "global_step0")
    assert [(source["step"], source["weight"]) for source in manifest.averaged] == [
        (step, pytest.approx(1 / 3)) for step in (1, 2, 3)]
    assert all(len(source["manifest_sha256"]) == 64 and Path(source["folder"]).is_dir() for source in manifest.averaged)
    plan = plan_export(out, tmp_path / "hf", with_tokenizer=False)
    export_hf(plan)
    assert "the average of 3 checkpoints" in model_card(plan)
    exported = HFWeights(check_hf_folder(tmp_path / "hf"))
    for name, value in weights.items():
        torch.testing.assert_close(exported.stored(name), value, rtol=0, atol=0)
    assert isinstance(find_initial_weights(str(out)).source, tuple)
    started = run_layouts({"started": (2, case("started", "start_from_weights", dp2(3), flags(
        corpus, steps=1, init_from=str(out))))}, tmp_path_factory.mktemp("started"))["started"]
    assert [line for line in diff(Path(started["folder"]), out / "checkpoints" / "global_step0")
            if line.state == "fp32"] == []


def _change(folder: Path, **fields: Any) -> None:
    (folder / MANIFEST).write_text(replace(read_manifest(folder), **fields).to_json())


def test_wrong_checkpoints_are_rejected_in_one_line(run: Path, tmp_path: Path) -> None:
    copy, out = _copy(run, tmp_path), tmp_path / "out"
    second = copy / "checkpoints" / "global_step2"
    model = read_manifest(second).model

    def rejects(message: str, **how: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            plan_average(copy, out, **how)

    rejects(r"--step 7: .*The run has the steps 3, 2, 1", steps=[1, 7])
    rejects("at least two", steps=[1])
    rejects("step 1 is named more than once", steps=[1, 2, 1])
    rejects("found 9; expected at most 3, the good checkpoints of", last=9)
    rejects("--weights: found 1 weights; expected 2", last=2, weights=[1.0])
    rejects("all weights are 0", last=2, weights=[0.0, 0.0])
    _change(second, model={**model, "n_positions": 99})
    rejects("its model differs from that of global_step3 in n_positions", last=3)
    _change(second, model=model, tokenizer_fingerprint="0" * 64)
    rejects("its tokenizer differs", last=3)
    _change(second, tokenizer_fingerprint=read_manifest(copy / "checkpoints" / "global_step3").tokenizer_fingerprint,
            finite=False)
    rejects("NaN or infinite values. Leave this step out", steps=[1, 2])
    plan = plan_average(copy, out, last=2)  # the newest two good ones
    assert [source.manifest.step for source in plan.sources] == [1, 3]
    assert "not used" in plan.notes[0]
    with pytest.raises(ConfigError, match="this is a single checkpoint"):
        plan_average(second, out, last=2)
    with pytest.raises(ConfigError, match="averaged weights are of step 0"):
        plan_average(copy, tmp_path / "global_step5", last=2)


def test_the_tool_verifies_all_files_and_leaves_nothing_of_a_failed_average(run: Path, tmp_path: Path) -> None:
    copy, out = _copy(run, tmp_path), tmp_path / "out"
    done = run_tool("average", str(copy), "--steps=1,2,3", "--ema=0.5", f"--output={out}")
    assert done.returncode == 0, done.stderr
    assert "0.1429 x step 1, 0.2857 x step 2, 0.5714 x step 3" in done.stdout
    file = max((copy / "checkpoints" / "global_step2").glob("*optim_states.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)
    done = run_tool("average", str(copy), "--last=3", f"--output={tmp_path / 'other'}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "global_step2: the checkpoint is damaged" in done.stderr
    assert not (tmp_path / "other").exists()
    assert json.loads((out / "checkpoints" / "global_step0" / MANIFEST).read_text())["averaged"]
