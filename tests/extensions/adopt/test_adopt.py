"""A run of another program becomes a checkpoint: every tensor in its place, and nothing is lost unnoticed."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.checkpoint.format.verify import damage_of
from pretrain.checkpoint.load.find_checkpoint import find_checkpoint
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.adopt import adopt, plan_adoption
from pretrain.extensions.adopt.foreign_run import ForeignRun, Omission
from pretrain.extensions.adopt.optimizers import WeightDecay
from pretrain.extensions.adopt.run_files import RUN_YAML, run_files
from pretrain.extensions.adopt.sources import find_source
from pretrain.model.config import model_config_from
from pretrain.model.hf_weights import to_transformers
from tests.checkpoint.starts import resumed, start_run, write_checkpoint
from tests.extensions.adopt.foreign import STATES, foreign_run, foreign_states
from tests.support.model_shapes import SHAPES
from tests.support.rejection import rejection
from tests.support.wrapped_models import needs_wrapped

transformers.logging.set_verbosity_error()


def adopted(run: ForeignRun, out: Path, *accepted: str) -> Path:
    """Adopt a run, and return its checkpoint."""
    adopt(plan_adoption(run, frozenset(accepted)), out)
    return find_checkpoint(out)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_moments_follow_the_same_mapping(name: str, tmp_path: Path) -> None:
    run = foreign_run(tmp_path / "hf", SHAPES[name])
    theirs = foreign_states(tmp_path / "hf", SHAPES[name])
    checkpoint = adopted(run, tmp_path / "run", "rng")
    reader, config = CheckpointReader(checkpoint), model_config_from(run.config, "config.json")
    assert set(reader.states) == {"fp32", *STATES}
    assert reader.scalars == {"step": 6}
    for state in ("fp32", *STATES):
        back = to_transformers({ours: reader.tensor(ours, state) for ours in reader.shapes}, config)
        for tensor, expected in theirs[state].items():
            assert torch.equal(back[tensor], expected), (tensor, state)
    manifest = read_manifest(checkpoint)
    assert damage_of(checkpoint, manifest) == []
    assert (manifest.step, manifest.consumed_samples, manifest.weights_only) == (6, 48, False)
    source = json.loads((checkpoint / "imported_from.json").read_text())
    assert source["program"] == "a program"
    assert source["files"]["config.json"]["sha256"] == hashlib.sha256(run.files[0].read_bytes()).hexdigest()


def rejected(run: ForeignRun, *accepted: str) -> str:
    """Return the message with which a run is rejected."""
    return rejection(plan_adoption, run, frozenset(accepted))


def test_all_losses_are_listed_in_one_line(tmp_path: Path) -> None:
    dropout = {**SHAPES["gpt2"], "resid_pdrop": 0.1}
    run = foreign_run(tmp_path, dropout, consumed_samples=None, precision="fp16",
                      omissions=(Omission("other_states", "an average of the weights"),))
    line = rejected(run)
    assert "\n" not in line
    for part in ("other_states (an average of the weights)", "data_position (", "loss_scale (", "rng (the model has",
                 "--accept_without other_states,data_position,loss_scale,rng adopts the run without it"):
        assert part in line, (part, line)
    assert "--accept_without loss_scale,rng" in rejected(run, "other_states", "data_position")
    plan = plan_adoption(run, frozenset(("other_states", "data_position", "loss_scale", "rng", "schedule")))
    assert plan.notes == ("--accept_without schedule has no effect: nothing of it is lost",)


@needs_wrapped
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_of_a_model_without_a_family_needs_random_states(dropout: float, tmp_path: Path) -> None:
    opt = {"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 1,
           "num_attention_heads": 2, "vocab_size": 96, "max_position_embeddings": 32, "dropout": dropout}
    run = foreign_run(tmp_path, opt)
    if dropout:
        assert "rng (the model has dropout" in rejected(run)
    else:
        assert plan_adoption(run, frozenset()).omissions == ()


def test_a_run_without_states_begins_its_optimizer_anew(tmp_path: Path) -> None:
    run = foreign_run(tmp_path / "hf", SHAPES["gpt2"], states=())
    assert "optimizer (it has no states of the optimizer)" in rejected(run)
    reader = CheckpointReader(adopted(run, tmp_path / "run", "optimizer"))
    assert (list(reader.states), reader.scalars) == (["fp32"], {})


DECAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "matrices": (lambda name, dim: 0.1 * (dim > 1), {}),
    "all": (lambda name, dim: 0.1, {"decay_vectors": True}),
    "none": (lambda name, dim: 0.0, {}),
    "no embeddings": (lambda name, dim: 0.1 * (dim > 1 and "wte" not in name and "wpe" not in name),
                      {"no_weight_decay": ["embeddings"]}),
    "all but norms": (lambda name, dim: 0.1 * ("ln_" not in name),
                      {"decay_vectors": True, "no_weight_decay": [
                          f"*.{norm}.{kind}" for norm in ("norm", "norm1", "norm2") for kind in ("bias", "weight")]}),
    "one layer": (lambda name, dim: 0.1 * (dim > 1 and ".1.mlp.c_fc" not in name),
                  {"no_weight_decay": ["3.mlp.up.weight"]})}


@pytest.mark.parametrize("name", DECAYS)
def test_weight_decay_becomes_flags(name: str, tmp_path: Path) -> None:
    decay, expected = DECAYS[name]
    run = foreign_run(tmp_path, SHAPES["gpt2"])
    run = dataclasses.replace(run, weight_decay={key: decay(key, len(shape)) for key, shape in run.shapes.items()})
    assert plan_adoption(run, frozenset()).decay.flags == expected


def test_weight_decay_that_no_flag_describes_is_a_loss(tmp_path: Path) -> None:
    run = foreign_run(tmp_path, SHAPES["llama"])
    several = {name: 0.1 if "q_proj" in name else 0.05 for name in run.shapes}
    assert "weight_decay (the parts of 1.attention.qkv.weight, 2.attention.qkv.weight, 3.attention.qkv.weight" in \
        rejected(dataclasses.replace(run, weight_decay=several))
    several = {name: 0.1 if "lm_head" in name else 0.05 for name in run.shapes}
    assert "weight_decay (parameters have the weight decays 0.05, 0.1)" in \
        rejected(dataclasses.replace(run, weight_decay=several))


def test_parameters_without_a_recorded_weight_decay_get_that_of_the_others(tmp_path: Path) -> None:
    """Parameters that were not trained are in no group of the optimizer."""
    run = foreign_run(tmp_path, SHAPES["llama"])
    for decays, flags in ((lambda dim: 0.1, {"decay_vectors": True}), (lambda dim: 0.1 * (dim > 1), {})):
        trained = {name: decays(len(shape)) for name, shape in run.shapes.items() if ".layers.0." not in name}
        decay = plan_adoption(dataclasses.replace(run, weight_decay=trained), frozenset()).decay
        assert (decay.flags, decay.problem) == (flags, "")


def test_damaged_bytes_that_torch_does_not_notice(tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    run = dataclasses.replace(foreign_run(tmp_path / "hf", SHAPES["gpt2"]), files=(path,))
    for has_crc in (False, True):
        torch.serialization.set_crc32_options(has_crc)
        torch.save({"a": torch.zeros(5000)}, path)
        adopted(run, tmp_path / f"run{has_crc}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    torch.load(path, weights_only=True)
    with pytest.raises(ConfigError, match=r"states\.pt: its part states/data/0 is damaged"):
        adopted(run, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_a_newest_checkpoint_that_is_missing(tmp_path: Path) -> None:
    for step in (3, 6):
        (tmp_path / f"global_step{step}").mkdir()
        (tmp_path / f"global_step{step}" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(ConfigError, match=r"the newest checkpoint is global_step9, .*by --step \(3, 6\)"):
        find_source(tmp_path, step=None, config={})
    source = find_source(tmp_path, step=3, config={})
    assert source is not None
    assert source.folder.name == "global_step3"


def test_parameters_of_another_model_are_rejected(tmp_path: Path) -> None:
    run = foreign_run(tmp_path, SHAPES["llama"])
    name = "model.layers.1.mlp.up_proj.weight"
    others = {key: shape for key, shape in run.shapes.items() if key != name}
    assert f"{name}: the model of the config.json has this parameter, and the checkpoint does not" in \
        rejected(dataclasses.replace(run, shapes=others))
    assert f"{name}: found the shape [3, 4]; expected [80, 48]" in \
        rejected(dataclasses.replace(run, shapes={**run.shapes, name: (3, 4)}))
    assert "adapter.weight: the model of the config.json does not have it" in \
        rejected(dataclasses.replace(run, shapes={**run.shapes, "adapter.weight": (3, 4)}))


def test_values_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    run = foreign_run(tmp_path / "hf", SHAPES["gpt2"])
    run.read("transformer.wpe.weight", "exp_avg")[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"transformer.wpe.weight exp_avg: it has values that are NaN or infinite"):
        adopted(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resume_compares_what_the_program_recorded(corpus: str, tmp_path: Path) -> None:
    flags = ["--train_data", corpus, "--split", "80,20,0", "--seq_length", "64", "--learning_rate", "1e-2"]
    plan = start_run(tmp_path, *flags, "--lr_schedule=linear", "--lr_counts_from_0").plan
    assert plan.schedule is not None
    recorded: dict[str, Any] = {"program": "a program", "folder": "/elsewhere", "losses": {}, "skipped_steps": 2,
                                "next_rate": plan.schedule(8)}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}  # without betas: they are not compared

    def resume(unknown: tuple[str, ...], *others: str, **changes: Any) -> list[str]:
        adopted = {**recorded, "unknown": ["data_fingerprint", "schedule", "scheduler", *unknown]}
        values = {"data_fingerprint": "", "data": None, "schedule": None, "scheduler": "", "optimizer": optimizer}
        write_checkpoint(plan, adopted=adopted, **{**values, **changes})
        return list(resumed(start_run(tmp_path, *flags, "--lr_schedule=linear", *others)).plan.notes)

    notes = resume((), "--lr_counts_from_0")
    assert [note for note in notes if "a program" in note] == [
        "the checkpoint of a program does not record its data: this run continues at sample 80 of --train_data "
        f"{corpus}, and pins it from here on"]
    (note,) = [note for note in resume(()) if "recorded the learning rate" in note]
    assert note.startswith(f"a program recorded the learning rate {plan.schedule(8):.4g} at step 10; this schedule")
    for name, wrong in (("seed", 7), ("seq_length", 32), ("global_batch_size", 1)):
        allowed = resume((name,), "--lr_counts_from_0", **{name: wrong})
        assert len(allowed) == len(notes)
    with pytest.raises(ConfigError, match="--seed: 7 in the checkpoint and 1234 in this run"):
        resume((), seed=7)
    with pytest.raises(ConfigError, match=r"optimizer lr: 0.01 in the checkpoint and 0.02 in this run"):
        resume((), "--learning_rate=2e-2")
    with pytest.raises(ConfigError, match="--decay_vectors: True in the checkpoint and False in this run"):
        resume((), recipe={"decay_vectors": True})


def test_the_files_of_a_run_name_the_flags_that_are_missing(tmp_path: Path) -> None:
    for name, changes, missing in (("nothing", {}, "train_data, seq_length, train_steps, lr_schedule"),
                                   ("all", {"seq_length": 64, "schedule": {
                                       "total_steps": 9, "type": "constant", "warmup_steps": 0}}, "train_data")):
        run = foreign_run(tmp_path / name, SHAPES["llama"], **{"seq_length": None, "schedule": {}, **changes})
        assert f"# Add {missing}. " in run_files(run, WeightDecay(), tmp_path)[RUN_YAML]
