"""Export for transformers: every architecture there and back, tokenizer, model card, wrong input and memory."""

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.new_folder import fill_new_folder, new_folder
from pretrain.checkpoint.convert.plan_export import model_card, plan_export
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.format.verify import damage_of
from pretrain.checkpoint.load.hf_folder import check_hf_folder, hash_files
from pretrain.checkpoint.load.reader import CheckpointReader, HFWeights
from pretrain.errors import ConfigError
from tests.checkpoint.test_export import load_exactly
from tests.checkpoint.test_import import add_tokenizer, imported
from tests.support.checkpoints import STEPS, real_run
from tests.support.conversion_faults import run_tool
from tests.support.hf_models import SAVES_PHI_ONCE, save_hf_model
from tests.support.model_shapes import SHAPES

transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("name", [pytest.param(name, marks=SAVES_PHI_ONCE if name == "phi_grouped" else ())
                                  for name in SHAPES])
def test_weights_survive_import_and_export_exactly(name: str, tmp_path: Path) -> None:
    before = save_hf_model(tmp_path / "hf", SHAPES[name])
    checkpoint = imported(tmp_path / "hf", tmp_path / "run")
    assert damage_of(checkpoint, read_manifest(checkpoint)) == []
    expected_weights = HFWeights(check_hf_folder(tmp_path / "hf")).weights()
    weights = CheckpointReader(checkpoint).weights()
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected_weights.items())
    plan = plan_export(checkpoint, tmp_path / "out", shard_gb=2e-5)
    export_hf(plan)
    assert len(list(plan.out.glob("model-*-of-*.safetensors"))) > 5
    after, expected = load_exactly(plan.out).state_dict(), before.state_dict()
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[key], value) for key, value in expected.items())
    # the files have the names and the index of transformers' own
    index = json.loads((plan.out / "model.safetensors.index.json").read_text())
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"] == {"total_parameters": plan.config.num_parameters(), "total_size": plan.num_bytes}
    assert hash_files(check_hf_folder(plan.out)).keys() == set(index["weight_map"].values())


def test_every_file_is_hashed(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    add_tokenizer(tmp_path / "hf", 97)
    out = tmp_path / "out"
    export_hf(plan_export(imported(tmp_path / "hf", tmp_path / "run"), out))
    files = json.loads((out / "source.json").read_text())["files"]
    assert {*files, "source.json"} == set(os.listdir(out))
    assert {"README.md", "tokenizer.json", "generation_config.json", "model.safetensors"} <= files.keys()
    for name, record in files.items():
        assert record["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest(), name
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(50_000)
        file.write(b"damage")
    with pytest.raises(ConfigError, match=r"found SHA-256 .*, as recorded"):
        hash_files(check_hf_folder(out))


def test_token_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", {**SHAPES["llama"], "bos_token_id": 1, "eos_token_id": 2})
    checkpoint = imported(tmp_path / "hf", tmp_path / "run")
    add_tokenizer(tmp_path, 97, eos=40)
    export_hf(plan_export(checkpoint, tmp_path / "out", tokenizer=str(tmp_path)))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 40, None)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 40
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 40
    assert "base_model" not in (tmp_path / "out/README.md").read_text()
    export_hf(plan_export(checkpoint, tmp_path / "without"))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "without")
    assert (config.bos_token_id, config.eos_token_id, config.dtype) == (1, 2, torch.float32)
    # a config with several tokens that end a text keeps them
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [40, 41]}))
    export_hf(plan_export(imported(tmp_path / "hf", tmp_path / "run2"), tmp_path / "list", tokenizer=str(tmp_path)))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "list").eos_token_id == [40, 41]
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "list").eos_token_id == [40, 41]


def _set_value(checkpoint: Path, name: str, value: float) -> None:
    [file] = checkpoint.glob("*.safetensors")
    state = load_file(file)
    state[name].view(-1)[5] = value
    save_file(state, file)


@pytest.mark.parametrize(("value", "dtype", "message"), [
    (7e4, "fp16", r"--dtype: 2.mlp.up.weight has values that are too large for torch.float16"),
    (float("nan"), "bf16", r"2.mlp.up.weight: it has values that are NaN or infinite")])
def test_values_that_are_not_finite_are_rejected(value: float, dtype: str, message: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    checkpoint = imported(tmp_path / "hf", tmp_path / "run")
    plan = plan_export(checkpoint, tmp_path / "out", dtype=dtype)
    _set_value(checkpoint, "2.mlp.up.weight", value)
    with pytest.raises(ConfigError, match=message):
        export_hf(plan)
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_the_model_card_has_the_facts_of_the_run(corpus: str, tmp_path_factory: pytest.TempPathFactory,
                                                 tmp_path: Path) -> None:
    run = real_run("pipeline2", corpus, tmp_path_factory)
    done = run_tool("export", run, "--output", tmp_path / "out", "--step", "2")
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(run / "checkpoints/global_step2")
    assert "parameters, bf16, architecture gpt2, from" in done.stdout
    assert load_exactly(tmp_path / "out").dtype is torch.bfloat16
    card = (tmp_path / "out/README.md").read_text()
    rows: dict[str, Any] = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))
    logged = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
              if "loss" in row and row["step"] <= 2]
    assert rows["training loss"] == f"{logged[-1]['loss']:.4f} nats per token at step {logged[-1]['step']}"
    assert rows["validation loss"] == f"{manifest.eval_loss:.4f} nats per token at step 2"
    assert rows["steps"] == f"2 of {STEPS}"
    assert rows["tokens"] == f"{manifest.consumed_samples * 64:,}"
    assert rows["data fingerprint"] == manifest.data_fingerprint
    assert manifest.data is not None
    assert rows["data SHA-256"] == manifest.data["sha256"]
    assert rows["layout"] == "2 ranks, ZeRO-1, 2 stages x 1 data-parallel"
    assert str(run) not in card  # no paths of this machine
    assert rows["initial weights"] == "random"
    plan = plan_export(run, tmp_path / "other")
    for name, known in (("org/name", "org/name"), (str(tmp_path / "folder"), "folder")):
        manifest = replace(manifest, origin={"name": name, "folder": str(tmp_path), "fingerprint": ""})
        card = model_card(replace(plan, manifest=manifest))
        assert f"| initial weights | {known} |" in card
        assert ("\nbase_model: org/name\n" in card) == (name == "org/name")
        assert str(tmp_path) not in card


def test_wrong_input_is_rejected_in_one_line_and_nothing_remains(tmp_path: Path) -> None:
    save_hf_model(tmp_path / "hf", SHAPES["gpt2"])
    checkpoint = imported(tmp_path / "hf", tmp_path / "run")
    words = ("export", tmp_path / "run", "--output", tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))

    def rejected(message: str, *more: str, **fault: Any) -> None:
        done = run_tool(*words, *more, **fault)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert message in done.stderr.splitlines()[-1]
        assert done.stderr.count("ds-pretrain: ") == 1
        assert sorted(tmp_path.rglob("*")) == before

    rejected("out: the folder cannot be written: File too large", largest_file=100_000)
    with open(checkpoint / "weights.safetensors", "r+b") as file:
        file.seek(50_000)
        file.write(b"damage")
    rejected("the checkpoint is damaged")


def test_a_checkpoint_that_is_removed_during_an_export_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match="global_step2: its manifest cannot be read any more"):
        fill_new_folder(tmp_path / "global_step2", tmp_path / "out", "export", lambda folder: None)
    assert not (tmp_path / "out").exists()


def test_two_conversions_do_not_write_the_same_folder(tmp_path):
    with new_folder(tmp_path / "out") as first:
        (first / "file").write_text("first")
        with pytest.raises(ConfigError, match="out: another process is writing this folder now"), \
                new_folder(tmp_path / "out"):
            pass
    assert (tmp_path / "out/file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
