"""tools/check_config.py: what it imports, and the plans of valid inputs. tests/wrong_inputs has the wrong ones."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.commands.check import main as check
from pretrain.config.ds_json.read import get_value
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.distributed.device import Device, cpu_device, detect_device
from pretrain.distributed.requirements import deepspeed_version
from pretrain.errors import ConfigError
from tests.support.effort import HEAVY, run_and_list_imports
from tests.support.wrapped_models import WRAPPED_MODELS, needs_wrapped
from tests.wrong_inputs.case import NOTHING
from tests.wrong_inputs.inputs import CPU, WRONG, run_json, run_words, z
from tests.wrong_inputs.world import make_world

ROOT = Path(__file__).parents[2]
CUDA = Device("cuda", fp16=True, bf16=True, memory_bytes=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with data, a tokenizer, and broken files."""
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def words(world: Path, json_changes: dict[str, Any], flags: dict[str, Any]) -> list[str]:
    """Return the command line of a valid run with changes. `{world}` in a flag becomes the path of the folder."""
    (world / "ds.json").write_text(run_json(json_changes))
    return [word.replace("{world}", str(world)) for word in run_words(flags)]


@pytest.mark.parametrize("culprit", ["broken.json:2", "truncated.bin"])
def test_rejection_imports_no_slow_packages(world: Path, culprit: str) -> None:
    row = next(row for row in WRONG if row[2] == culprit)
    done, imported = run_and_list_imports([str(ROOT / "tools" / "check_config.py"), *words(world, row[0], row[1])])
    assert "pretrain.config.validate" in imported
    assert not HEAVY & imported
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert culprit in done.stderr


def test_validation_imports_neither_torch_nor_deepspeed(world: Path) -> None:
    done, imported = run_and_list_imports([str(ROOT / "tools" / "check_config.py"), *words(world, {}, {})])
    assert (done.returncode, {"torch", "deepspeed", "transformers"} & imported) == (0, set()), done.stderr


def test_a_valid_run_prints_its_plan(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"world_size": 4, "global_batch_size": 8, "gradient_accumulation_steps": 2, "valid_data": "{world}/few"}
    check(words(world, {"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}, flags))
    out = capsys.readouterr().out
    assert "ZeRO-1, 2 pipeline stages x 2 data-parallel = 4 ranks" in out
    assert "8 samples a step = 2 micro-batch x 2 accumulation x 2 data-parallel" in out
    assert "50 steps x 512 tokens = 25,600 tokens" in out
    assert "cosine, peak 0.001" in out


def test_the_plan_has_the_predicted_memory_and_whether_it_fits(
        world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*own: str, **flags: Any) -> dict[str, list[str]]:
        check([*words(world, {}, {"device": NOTHING, **flags}), *own])
        found: dict[str, list[str]] = {}
        for line in capsys.readouterr().out.splitlines():
            found.setdefault(line.split()[0], []).append(line)
        return found

    wide = {"model_overrides": "n_embd=8192,n_layer=48"}
    for gpu, flags, fits in (("a10g", {}, True), ("a10g", wide, False), ("b200", wide, False)):
        found = lines("--gpu", gpu, **flags)
        assert " MiB at the peak (parameters " in found["memory"][0] or " GiB at" in found["memory"][0]
        assert ("THE RUN DOES NOT FIT" in "".join(found.get("warning", ()))) == (not fits), (gpu, found)
    assert "not fit" not in "".join(map(str, lines("--device", "cpu").get("warning", [])))
    assert "THE RUN DOES NOT FIT" in lines("--device", "cpu", **wide)["warning"][0]
    for words_, message in ((["--gpu", "h1000"], "--gpu"), (["--gpu", "a10g", "--device", "cpu"], "--device cpu was")):
        with pytest.raises(ConfigError, match=message):
            lines(*words_)


def plan_of(world: Path, json_changes: dict[str, Any], *, world_size: int = 1, device: Device = CUDA,
            **flags: Any) -> Plan:
    path = words(world, json_changes, {})[1]
    args = RunArguments(deepspeed_config=path, model="tiny", train_data=str(world / "corpus"), seq_length=64,
                        train_steps=50, save=str(world / "run"))
    return check_run(dataclasses.replace(args, **flags), world_size=world_size, device=device)


def test_notes_on_rates_that_hardly_fit_the_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 50 steps, with the schedule of the flags and with a scheduler of the JSON."""
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}}
    check(words(world, {"scheduler": scheduler}, {}))
    out = capsys.readouterr().out
    assert "step 1: 0, step 2: 0, step 9: 0.0002857, step 25: 0, step 50: 0" in out
    assert "the JSON's scheduler: the learning rate reaches its lowest value, 0, at step 11, and 39 of the 50" in out
    assert "the learning rate" not in " ".join(plan_of(world, {"scheduler": {
        **scheduler, "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}).notes)
    assert any(note.startswith("--lr_schedule cosine: the learning rate reaches its lowest value, 0.0001, at step 20, "
                               "and 30 of the 50") for note in plan_of(world, {}, lr_decay_steps=20).notes)


@pytest.mark.parametrize(("vocab_size", "fits"), [(300, True), (512, True), (8192, False)])
def test_a_vocabulary_far_larger_than_the_tokenizer_gets_a_note(world: Path, vocab_size: int, fits: bool) -> None:
    """A vocabulary of 512 for a tokenizer with 300 tokens is usual padding."""
    plan = plan_of(world, {}, tokenizer=str(world / "tokenizer.json"), train_data=str(world / "few"),
                   model_overrides=f"vocab_size={vocab_size}")
    notes = [note for note in plan.notes if "tokenizer" in note]
    assert len(notes) == (0 if fits else 1)
    assert fits or "--model_overrides vocab_size=320" in notes[0]


def test_a_long_document_outside_the_training_part_gets_a_note(world: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "long_last", np.uint16) as writer:
        for length in [100] * 99 + [8000]:
            writer.add_document(np.resize(np.arange(1, 97), length))
        writer.finalize()
    data = {"train_data": str(tmp_path / "long_last")}
    for flags, fraction in (({}, "54%"), ({"valid_data": str(world / "few"), "split": "9,0,1"}, "50%"),
                            ({"split": "50,50,0"}, "28%"), ({"split": "1,0,0"}, None),
                            ({"train_data": str(world / "corpus")}, None)):
        notes = [note for note in plan_of(world, {}, **{**data, **flags}).notes if note.startswith("--split")]
        assert [fraction in note for note in notes] == ([] if fraction is None else [True]), (flags, notes)


def test_the_plan_of_a_pipeline(world: Path) -> None:
    changes = {"pipeline": {"stages": 2, "partition": "best", "activation_checkpoint_interval": 3},
               "zero_optimization.offload_optimizer": CPU}
    plan = plan_of(world, changes, world_size=4, global_batch_size=8, gradient_accumulation_steps=2)
    layout = plan.layout
    assert (layout.zero_stage, layout.pipeline_stages, layout.data_parallel_size, layout.world_size) == (1, 2, 2, 4)
    assert (layout.micro_batch_size, layout.gradient_accumulation_steps, layout.global_batch_size) == (2, 2, 8)
    assert (layout.partition_method, layout.activation_checkpoint_interval) == ("flops", 3)
    assert (layout.offload_optimizer, layout.offload_param, layout.precision) == ("cpu", "none", "bf16")
    assert layout.uses_pipeline_module
    assert plan.ds_config["pipeline"] == {"stages": 2, "partition_method": "flops", "use_reentrant": False,
                                          "activation_checkpoint_interval": 3}
    assert plan.eod_token == 0  # from the data's .meta.json
    assert plan.schedule is not None
    assert plan.schedule.peak == 1e-3
    assert plan.schedule(0) == 1e-3


def test_nvme_needs_a_deepspeed_whose_swaps_are_right(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = words(world, z("offload_optimizer", {"device": "nvme", "nvme_path": str(world)}), {})
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.19.3")
    deepspeed_version.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"^deepspeed 0\.19\.3: offload to NVMe needs DeepSpeed 0\.19\.4"):
            check(line)
    finally:
        deepspeed_version.cache_clear()


def test_the_plan_of_zero_3_with_nvme_from_the_environment(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PRETRAIN_NVME_PATH", str(world / "nvme"))
    changes = z("offload_optimizer", {"device": "nvme", "nvme_path": "auto"}) | {"aio": {"queue_depth": 4}}
    plan = plan_of(world, changes)
    layout = plan.layout
    assert (layout.zero_stage, layout.offload_optimizer, layout.uses_pipeline_module) == (3, "nvme", False)
    path = Path(get_value(plan.ds_config, "zero_optimization.offload_optimizer.nvme_path"))
    assert path.parent == world / "nvme"
    other = plan_of(world, changes, save=str(world / "another-run"))  # each run needs its own swap folder
    assert get_value(other.ds_config, "zero_optimization.offload_optimizer.nvme_path") != str(path)


def test_fp16_needs_a_device_with_fp16_or_emulation(world: Path) -> None:
    changes = {"bf16": NOTHING, "fp16": {"enabled": True}}
    assert plan_of(world, changes).layout.precision == "fp16"
    slow = Device("cpu", fp16=False, bf16=True, memory_bytes=0)
    assert plan_of(world, changes, device=slow, emulate_fp16=True).layout.precision == "fp16"
    with pytest.raises(ConfigError, match="--emulate_fp16"):
        plan_of(world, changes, device=slow)


def test_tf32_needs_a_gpu_that_has_it(world: Path) -> None:
    old = Device("cuda", fp16=True, bf16=False, memory_bytes=0)
    assert plan_of(world, {"bf16": NOTHING}, device=CUDA, tf32=True).args.tf32
    with pytest.raises(ConfigError, match="--tf32: this GPU has no TF32"):
        plan_of(world, {"bf16": NOTHING}, device=old, tf32=True)


def test_a_scheduler_of_the_json_replaces_the_flags(world: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    plan = plan_of(world, {"scheduler": scheduler}, lr_warmup_steps=5)
    assert plan.schedule is None
    assert plan.ds_config["scheduler"]["params"] == {"warmup_num_steps": 5}


def test_tokens_become_steps(world: Path) -> None:
    plan = plan_of(world, {"train_batch_size": 4}, train_steps=None, train_tokens=64 * 4 * 7 + 1)
    assert plan.train_steps == 8
    assert plan.layout.tokens_per_step == 256
    assert plan.epochs == 8 * 4 / plan.datasets["train"].samples_per_epoch


def test_notes_name_settings_without_an_effect(world: Path) -> None:
    plan = plan_of(world, {"zero_optimization.overlap_comm": True}, split="1,0,0")
    assert [note.split(":")[0] for note in plan.notes] == [
        "zero_optimization.overlap_comm", "the data's tokenizer has 512 tokens and the model's vocabulary 8,192, of "
        "which 7,680 are never used", "no validation data", "no batch size is given"]
    assert plan.ds_config["zero_optimization"]["overlap_comm"] is False


@needs_wrapped
def test_notes_name_a_padding_token_that_ends_documents(world: Path, tmp_path: Path) -> None:
    found = {}
    for token in (0, 255):
        (tmp_path / "config.json").write_text(json.dumps({**WRAPPED_MODELS["granite"], "vocab_size": 512,
                                                          "pad_token_id": token}))
        notes = plan_of(world, {}, model=str(tmp_path), model_overrides=None).notes
        found[token] = [note for note in notes if "pad_token_id" in note]
    assert [note[:33] for note in found[0]] == ["the token 0, which ends documents"]
    assert found[255] == []


@needs_wrapped
def test_notes_name_biases_of_routers_that_are_not_updated(world: Path, tmp_path: Path) -> None:
    found = {}
    for name in ("deepseek_v3", "granite"):
        (tmp_path / "config.json").write_text(json.dumps({**WRAPPED_MODELS[name], "vocab_size": 512}))
        notes = plan_of(world, {}, model=str(tmp_path), model_overrides=None).notes
        found[name] = [note for note in notes if "balances the load" in note]
    assert [note[:49] for note in found["deepseek_v3"]] == ["e_score_correction_bias of 2 routers is not updat"]
    assert found["granite"] == []


def test_the_device_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert detect_device() == cpu_device()
    assert cpu_device().bf16
    assert cpu_device().memory_bytes > 2**28


def test_notes_name_validation_data_that_the_model_has_seen(world: Path) -> None:
    plan = plan_of(world, {}, valid_data=str(world / "corpus"))
    assert any(f"{world / 'corpus'} is training data and validation data" in note for note in plan.notes)


@pytest.mark.parametrize(("schedule", "note"), [
    ("0:16,1e3:32,1e9:64", "the run ends before its sequences have 64 tokens"),
    ("0:64,1e3:32,2e3:64", "the sequences get shorter, from 64 to 32 tokens")])
def test_notes_name_lengths_that_fall_or_are_not_reached(world: Path, schedule: str, note: str) -> None:
    notes = plan_of(world, {}, seq_length_schedule=schedule, seq_length=64).notes
    assert [each for each in notes if "seq_length_schedule" in each] == [f"--seq_length_schedule: {note}"]


@pytest.mark.parametrize(("json_changes", "flags", "expected"), [
    ({}, {}, ["no batch size is given: the global batch is 8 x 64 tokens"]),
    ({"optimizer.params.weight_decay": 10}, {"micro_batch_size": 1}, ["weight decay 10: each step at the peak rate "]),
    ({"optimizer.params.weight_decay": 1}, {"micro_batch_size": 1}, []),
    ({"optimizer.params": {"lr": 1e-4, "weight_decay": 10}, "optimizer.type": "Lion"}, {"micro_batch_size": 1}, []),
    ({}, {"global_batch_size": 8, "model_overrides": "resid_pdrop=0.9"},
     ["dropout of more than half of the values (residual 0.9)"]),
    ({"train_batch_size": 8}, {"model_overrides": "resid_pdrop=0.5"}, [])])
def test_notes_name_a_default_batch_and_unusual_regularization(world: Path, json_changes: dict[str, Any],
                                                               flags: dict[str, Any], expected: list[str]) -> None:
    notes = [note for note in plan_of(world, json_changes, world_size=8, **flags).notes
             if note.startswith(("no batch size", "weight decay", "dropout of"))]
    assert [note[:len(start)] for note, start in zip(notes, expected, strict=True)] == expected


@pytest.mark.parametrize(("scaling", "batch", "reference", "optimizer", "expected"), [
    ("sqrt", 8, 8, "AdamW", []), ("sqrt", 32, 8, "AdamW", []), ("linear", 32, 8, "SGD", []),
    ("linear", 32, 8, "AdamW", ["this rule is known to hold for SGD (arXiv 1706.02677), not for adamw; for Adam: "]),
    ("sqrt", 32, 8, "SGD", ["this rule is known to hold for Adam and RMSprop (arXiv 2205.10287), not for sgd; for "]),
    ("sqrt", 8, 256, "AdamW", []),
    ("sqrt", 8, 1024, "AdamW", ["the batches differ by a factor of 128; the linear rule was found to hold up to 32, "]),
    ("sqrt", 8, 32768, "AdamW", ["the batches differ by a factor of 4,096; ", "it holds for batches below "])])
def test_notes_name_scaled_rates_beyond_the_known_range(world: Path, scaling: str, batch: int, reference: int,
                                                        optimizer: str, expected: list[str]) -> None:
    plan = plan_of(world, {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}, world_size=8, lr_scaling=scaling,
                   lr_reference_batch=reference, global_batch_size=batch, split="1,0,0")
    flag = f"--lr_scaling {scaling}: "
    notes = [note.removeprefix(flag) for note in plan.notes if note.startswith(flag)]
    assert notes[0].startswith("the peak learning rate is ")
    assert [note[:len(start)] for note, start in zip(notes[1:], expected, strict=True)] == expected


def test_notes_name_sizes_that_are_slow_on_gpus(world: Path) -> None:
    def notes(device: Device, vocab_size: int) -> list[str]:
        return [note for note in plan_of(world, {}, device=device, model_overrides=f"vocab_size={vocab_size}").notes
                if "no multiple of" in note]

    (note,) = notes(CUDA, 517)
    assert note.startswith("vocabulary 517 is no multiple of 8: --model_overrides vocab_size=576 is one. Gain: ")
    assert notes(CUDA, 576) == notes(dataclasses.replace(CUDA, kind="cpu"), 517) == []


def test_notes_name_faster_operators_that_cannot_be_used(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_words(device: Device, **flags: Any) -> list[str]:
        return [note.split(":")[0] for note in plan_of(world, {}, device=device, micro_batch_size=1,
                                                                  **flags).notes if "vocabulary" not in note][1:]

    monkeypatch.setattr("shutil.which", lambda name: None)
    on_cpu = dataclasses.replace(CUDA, kind="cpu")
    dropping = "attn_pdrop=0.1"
    assert first_words(on_cpu, model_overrides=dropping) == ["attention dropout", "no C compiler"]
    assert first_words(CUDA, model_overrides=dropping, compile_blocks=True) == []
    assert first_words(on_cpu, compile_blocks=True)[0].startswith("--compile_blocks on a CPU")


@pytest.mark.parametrize(("changes", "key"), [
    ({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, "optimizer.type"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
])
def test_without_nvcc_only_what_needs_it_is_rejected(world: Path, changes: dict[str, Any], key: str) -> None:
    without = dataclasses.replace(CUDA, compiles=False)
    plan_of(world, changes)
    with pytest.raises(ConfigError, match=f"{key}: it is a CUDA operator that DeepSpeed compiles"):
        plan_of(world, changes, device=without)
    params = plan_of(world, {}, device=without).ds_config["optimizer"]["params"]
    assert (params["torch_adam"], params["fused"]) == (True, True)
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2}}
    assert plan_of(world, muon, device=without).ds_config["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in plan_of(world, muon).ds_config["optimizer"]["params"]


def test_every_command_line_of_the_tests_on_gpus_is_accepted() -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "tests.support.validated_starts",
                           "-p", "no:cacheprovider", "tests/gpu/test_runs.py"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 80
    assert "skipped" not in done.stdout
