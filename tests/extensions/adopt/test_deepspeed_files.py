"""Checkpoints of other programs with DeepSpeed are read exactly, and damaged ones are rejected in one line."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pretrain.config.ds_json.schema import MONITORS
from pretrain.errors import ConfigError
from pretrain.extensions.adopt.foreign_run import ForeignRun
from pretrain.extensions.adopt.main import main
from pretrain.extensions.adopt.sources import find_source
from tests.support.cases import NO_NVME, config, nvme
from tests.support.launch import run_worker
from tests.support.poison import Poison

STEPS, BATCH = 3, 8
# 27 is odd, so that partitions have padding
GPT2 = {"model_type": "gpt2", "vocab_size": 131, "n_embd": 27, "n_layer": 2, "n_head": 3, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
BIG = {**GPT2, "n_embd": 256, "n_head": 4, "n_layer": 1}  # DeepSpeed swaps only sub-groups of at least 1 MiB a rank
QWEN = {"model_type": "qwen3", "vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 32, "head_dim": 8,
        "tie_word_embeddings": True}
FROZEN = "transformer.wpe.weight"
AUTO = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
NEEDS_NVME = pytest.mark.skipif(bool(NO_NVME), reason=NO_NVME)
ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "seed": 17,
             "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine", "max_grad_norm": 0.0}


def plain(model: dict[str, Any], values: dict[str, Any], **others: Any) -> dict[str, Any]:
    values["gradient_clipping"] = 0.0  # the norm is a sum in another order at each ZeRO stage
    return {"program": "plain", "model": model, "config": values, **others}


def trainer(stage: int | None, **arguments: Any) -> dict[str, Any]:
    values = None if stage is None else {**AUTO, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage},
                                         "zero_allow_untested_optimizer": True}
    return {"program": "trainer", "model": GPT2, "config": values, "arguments": {**ARGUMENTS, **arguments}}


def without_optimizer(stage: int) -> dict[str, Any]:
    values = config(stage, micro=2, accumulation=1)
    return {key: value for key, value in values.items() if key not in ("optimizer", "gradient_clipping")}


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    bf16_optimizer = {**config(1, precision="bf16", micro=2), "data_types": {"grad_accum_dtype": "fp32"}}
    fp16 = config(2, micro=2)
    fp16["fp16"] = {"enabled": True, "initial_scale_power": 8}
    found = {
        "stage 0": plain(GPT2, config(0, micro=2), groups=True),
        "stage 0 bf16": plain(QWEN, config(0, precision="bf16", micro=2), groups=True),
        "stage 1": plain(GPT2, config(1, micro=2), groups=True, own_schedule=True),
        "stage 2 round robin": plain(GPT2, config(2, micro=2, round_robin_gradients=True), groups=True),
        "stage 2 frozen": plain(GPT2, config(2, micro=2), freeze=FROZEN),
        "stage 3": plain(GPT2, config(3, micro=2, sub_group_size=3000), groups=True, freeze=FROZEN),
        "BF16_Optimizer": plain(QWEN, bf16_optimizer),
        "offload": plain(QWEN, config(2, precision="bf16", micro=2, offload_optimizer={"device": "cpu"})),
        "fp16": plain(GPT2, fp16),
        "Trainer": trainer(2, bf16=True),
        "Trainer without DeepSpeed": trainer(None),
        "accelerate": {"program": "accelerate", "model": QWEN, "config": without_optimizer(2), "groups": True}}
    if not NO_NVME:
        found["NVMe"] = plain(BIG, config(3, micro=2, sub_group_size=300_000, offload_optimizer=nvme(folder / "nvme")))
    return found


@dataclass(frozen=True)
class Saved:
    """The checkpoints of all cases."""

    folder: Path
    cases: dict[str, dict[str, Any]]

    def path(self, name: str) -> Path:
        return self.folder / name.replace(" ", "_")

    def read(self, name: str, folder: Path | None = None) -> ForeignRun:
        source = find_source(folder or self.path(name), step=None, config=self.cases[name]["model"])
        assert source is not None
        return source.read()

    def live(self, name: str) -> dict[tuple[str, str], torch.Tensor]:
        found: dict[tuple[str, str], torch.Tensor] = torch.load(self.path(name) / "live.pt")
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("foreign")
    np.save(folder / "samples.npy", np.random.default_rng(0).integers(1, 131, (STEPS * BATCH, 17)))
    found = Saved(folder, cases(folder))
    run_worker("other_programs.py", [{**case, "name": name.replace(" ", "_"), "samples": "samples.npy", "steps": STEPS,
                                    "save_at": STEPS} for name, case in found.cases.items()], 2, folder)
    return found


def values_of(run: ForeignRun) -> dict[tuple[str, str], torch.Tensor]:
    return {(name, state): run.read(name, state) for name in run.shapes for state in ("fp32", *run.states)}


def assert_equal(found: dict[tuple[str, str], torch.Tensor], expected: dict[tuple[str, str], torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []


def assert_near(found: dict[tuple[str, str], torch.Tensor], expected: dict[tuple[str, str], torch.Tensor],
                tolerance: float) -> None:
    """Compare with the same values of another layout or precision, where rounding differs."""
    assert found.keys() == expected.keys()
    for (name, state), value in found.items():
        wanted = expected[name, state].double()
        if name.endswith("c_attn.bias"):
            continue  # the gradient of a key's bias is 0 but for rounding, and Adam amplifies it
        assert (value.double() - wanted).norm() <= tolerance * wanted.norm(), (name, state)


@pytest.mark.parametrize("name", ["stage 0", "stage 0 bf16", "stage 1", "BF16_Optimizer", "offload", "fp16", "Trainer",
                                  "accelerate", pytest.param("NVMe", marks=NEEDS_NVME)])
def test_states_are_those_of_the_live_engine(name: str, saved: Saved) -> None:
    run = saved.read(name)
    assert_equal(values_of(run), saved.live(name))
    assert run.states == ("exp_avg", "exp_avg_sq")
    assert (run.step, run.consumed_samples) == (STEPS, STEPS * run.global_batch_size)
    assert run.global_batch_size == (4 if name == "accelerate" else BATCH)
    assert ("lm_head.weight" in run.shapes) is False, "all models tie their heads"
    assert all(path.is_file() for path in run.files)
    # DeepSpeed's 16-bit optimizers without ZeRO take a step with zero gradients when they are made
    assert run.optimizer_step == STEPS + (name == "stage 0 bf16")
    assert run.optimizer["type"] == "AdamW"
    assert run.precision == {"stage 0 bf16": "bf16", "BF16_Optimizer": "bf16", "offload": "bf16", "Trainer": "bf16",
                             "fp16": "fp16"}.get(name, "fp32")


def test_round_robin_gradients(saved: Saved) -> None:
    """Here DeepSpeed's report of the live engine has parts under wrong names. All stages train the same weights."""
    assert_near(values_of(saved.read("stage 2 round robin")), saved.live("stage 0"), 0.01)
    assert saved.read("stage 1").schedule["last_step"] == STEPS


@pytest.mark.parametrize("name", ["stage 2 frozen", "stage 3"])
def test_frozen_parameters_have_states_of_0(name: str, saved: Saved) -> None:
    run = saved.read(name)
    found = values_of(run)
    frozen = {key: found.pop(key) for key in [*found] if key[0] == FROZEN}
    assert_equal(found, saved.live(name))
    assert frozen[FROZEN, "fp32"].abs().max() > 0
    assert not frozen[FROZEN, "exp_avg"].any()
    assert [omission.name for omission in run.omissions] == ["other_states"]
    assert FROZEN in run.omissions[0].reason


def test_groups_and_scalars(saved: Saved) -> None:
    run = saved.read("stage 3")
    assert {run.weight_decay[name] for name, shape in run.shapes.items() if name != FROZEN and len(shape) > 1} == {0.1}
    assert {run.weight_decay[name] for name, shape in run.shapes.items() if len(shape) == 1} == {0.0}
    scale = saved.read("fp16").loss_scale
    assert scale is not None
    assert scale["cur_scale"] == 256
    assert scale["cur_iter"] == STEPS


def test_the_trainer_records_the_schedule(saved: Saved) -> None:
    for name in ("Trainer", "Trainer without DeepSpeed"):
        run = saved.read(name)
        assert run.program.startswith("transformers.Trainer")
        assert run.seed == ARGUMENTS["seed"]
        assert run.learning_rate == pytest.approx(ARGUMENTS["learning_rate"])
        assert {name: run.schedule[name] for name in ("type", "total_steps", "last_step", "flags")} == {
            "type": "cosine", "total_steps": STEPS, "last_step": STEPS,
            "flags": {"lr_schedule": "cosine", "lr_warmup_steps": 2, "lr_counts_from_0": True, "lr_decay_steps": STEPS,
                      "min_lr_ratio": 0.0}}
        assert run.omissions == run.notes == ()
    found = {omission.name for omission in saved.read("accelerate").omissions}
    assert "schedule" in found, "it is stepped once for each rank"


def test_the_engine_has_the_scheduler_if_the_json_has_the_optimizer(saved: Saved, tmp_path: Path) -> None:
    """Then the Trainer writes no scheduler.pt."""
    shutil.copytree(saved.path("Trainer"), tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-3"
    scheduler = torch.load(folder / "scheduler.pt")
    edit(MODEL, lambda file: file.update(lr_scheduler=scheduler))(folder)
    (folder / "scheduler.pt").unlink()
    run = saved.read("Trainer", tmp_path / "run")
    assert (run.schedule, run.omissions) == (saved.read("Trainer").schedule, ())
    edit(MODEL, lambda file: file.update(lr_scheduler=None))(folder)
    assert [omission.name for omission in saved.read("Trainer", tmp_path / "run").omissions] == ["schedule"]


def test_the_trainer_without_deepspeed(saved: Saved) -> None:
    """Its files have no names of moments: they follow from the order of the parameters."""
    run = saved.read("Trainer without DeepSpeed")
    assert run.ds_config == {"gradient_clipping": ARGUMENTS["max_grad_norm"]}
    assert (run.consumed_samples, run.precision, run.optimizer_step) == (STEPS * BATCH, "fp32", STEPS)
    assert_near(values_of(run), values_of(saved.read("Trainer")), 0.3)


Change = Callable[[Path], None]


def edit(file: str, change: Callable[[Any], None]) -> Change:
    def apply(folder: Path) -> None:
        content = torch.load(folder / file, weights_only=False)
        change(content)
        torch.save(content, folder / file)
    return apply


def truncate(file: str) -> Change:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:5000]) and None


MODEL, RANK_0, RANK_1 = ("global_step3/mp_rank_00_model_states.pt", *(
    f"global_step3/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)))
STATE = "optimizer_state_dict"
DAMAGE: dict[str, tuple[str, Change, str]] = {
    "missing rank": ("stage 1", lambda folder: (folder / RANK_1).unlink(), "of rank 1 is missing"),
    "one rank more": ("stage 1", lambda folder: shutil.copy(folder / RANK_1, str(folder / RANK_1).replace("_1_", "_2_"))
                      and None, "it has files of 3 ranks, and the checkpoint is of 2"),
    "truncated": ("stage 1", truncate(RANK_0), "found an unreadable file"),
    "truncated model": ("stage 0", truncate(MODEL), "found an unreadable file"),
    "partition count": ("stage 1", edit(RANK_1, lambda file: file[STATE].update(partition_count=[4, 4])),
                        r"found partition_count \[4, 4\]; expected 2"),
    "partition size": ("stage 1", edit(RANK_1, lambda file: file[STATE]["group_paddings"].__setitem__(0, 8)),
                       "of parameter group 0; expected equal ones"),
    "other step": ("offload", edit(
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        lambda file: file[STATE]["base_optimizer_state"]["state"][0].update(step=9)),
                   "found step 3 of the optimizer; expected 9"),
    "other weights": ("fp16", edit(MODEL, lambda file: file["module"]["transformer.wpe.weight"].add_(1)),
                      "are not its fp32 weights in the optimizer's files, rounded"),
    "unknown optimizer": ("stage 1", edit(RANK_0, lambda file: file[STATE]["base_optimizer_state"]["param_groups"][0]
                                          .update(amsgrad=True)), "is not one that can be continued here"),
    "state of another size": ("stage 3", edit(
        "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda file: file[STATE][STATE]["state"][0].update(row=torch.zeros(3))), "row: found 3 elements"),
    "sub-groups": ("stage 3", edit("global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
                                   lambda file: file[STATE]["fp32_flat_groups"].pop()), "sub-groups; expected"),
    "other model file": ("stage 3", lambda folder: (folder / "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt")
                         .unlink(), r"model_states\.pt of rank 1 is missing"),
    "ambiguous groups": ("stage 0", edit(MODEL, lambda file: file["optimizer"]["param_groups"][1]["params"].append(
        file["optimizer"]["param_groups"][0]["params"].pop())), "several parameter groups of the optimizer"),
    "tensor parallelism": ("stage 0", lambda folder: shutil.copy(
        folder / MODEL, folder / MODEL.replace("rank_00", "rank_01")) and None, "several tensor-parallel parts"),
    "not a checkpoint": ("stage 0", lambda folder: torch.save({"module": {}}, folder / MODEL), "there is nothing at"),
    "other types": ("stage 1", edit(MODEL, lambda file: file.update(param_shapes=[["a"], ["b"]])),
                    "param_shapes is not a list of names and shapes"),
    "trainer_state.json": ("Trainer", lambda folder: (folder / "checkpoint-3/trainer_state.json").write_text("{")
                           and None, r"trainer_state\.json: it cannot be read"),
    "no engine folder": ("Trainer", lambda folder: shutil.rmtree(folder / "checkpoint-3/global_step3"),
                         "the folder global_step3 of DeepSpeed is missing"),
    "no optimizer": ("Trainer without DeepSpeed", lambda folder: (folder / "checkpoint-3/optimizer.pt").unlink(),
                     r"neither a folder of DeepSpeed nor a file optimizer\.pt")}
if not NO_NVME:
    SWAPPED = "global_step3/offloaded_tensors/rank01"
    DAMAGE["no swapped files"] = "NVMe", lambda folder: shutil.rmtree(folder / SWAPPED), "no file with the weights"
    DAMAGE["short swapped file"] = "NVMe", lambda folder: next((folder / SWAPPED).glob("exp_avg-*")).write_bytes(
        b"0" * 4096) and None, "it has 4096 bytes"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoints_are_rejected(damage: str, saved: Saved, tmp_path: Path) -> None:
    name, change, message = DAMAGE[damage]
    shutil.copytree(saved.path(name), tmp_path / "run")
    change(tmp_path / "run")
    with pytest.raises(ConfigError, match=message) as rejected:
        values_of(saved.read(name, tmp_path / "run"))
    assert "\n" not in str(rejected.value)


def test_pickles_run_nothing(saved: Saved, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for name, file in (("stage 1", RANK_1), ("stage 0", MODEL), ("Trainer", "checkpoint-3/scheduler.pt"),
                       ("Trainer without DeepSpeed", "checkpoint-3/optimizer.pt")):
        run = tmp_path / name
        shutil.copytree(saved.path(name), run)
        torch.save({"optimizer_state_dict": Poison(str(canary)), "state": torch.zeros(3)}, run / file)
        with pytest.raises(ConfigError, match="Nothing in the file was run"):
            saved.read(name, run)
    # settings are read through stand-ins; a file with other content has none
    (tmp_path / "settings").mkdir()
    run = tmp_path / "settings" / "run"
    shutil.copytree(saved.path("Trainer"), run)
    torch.save(Poison(str(canary)), run / "checkpoint-3/training_args.bin")
    found = saved.read("Trainer", run)
    assert "training_args.bin cannot be read without running it" in found.notes[0]
    assert "type" not in found.schedule
    assert json.loads((run / "checkpoint-3/trainer_state.json").read_text())["global_step"] == found.step
    assert not canary.exists()


# line breaks of YAML, of Python and of terminals
BREAKS = ("\n", "\r\n", "\r", "\x85", "\u2028", "\u2029", "\x0b", "\x0c")
INJECTED = "".join(f"{each}model_code: stranger" for each in BREAKS)
PATH = "/outside/stranger"
# all of the schema's keys that name a file, a host or an account, and what else reports
REPORTS: dict[str, Any] = {
    "tensorboard": {"enabled": True, "output_path": PATH, "job_name": f"../..{PATH}"},
    "csv_monitor": {"enabled": True, "output_path": PATH, "job_name": f"../..{PATH}"},
    "wandb": {"enabled": True, "team": "stranger", "group": "stranger", "project": "stranger"},
    "comet": {"enabled": True, "workspace": "stranger", "api_key": "stranger", "project": "stranger"},
    "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": PATH},
    "comms_logger": {"enabled": True, "prof_ops": ["stranger"]}, "aio": {"block_size": 4096}, "dump_state": True}
STRANGER = {**REPORTS, f"new{INJECTED}": {"stranger": [PATH]}, "zero_optimization": {
    "stage": 1, "reduce_bucket_size": 12345, "offload_param": {"device": "nvme", "nvme_path": PATH},
    "offload_optimizer": {"device": "cpu", "pin_memory": False, "nvme_path": PATH}}}


def imported(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Call `ds-pretrain import`."""
    monkeypatch.setattr(sys, "argv", ["import", str(source), "--save", str(out), *words])
    main()


def test_text_and_paths_of_a_stranger_remain_values(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in the checkpoint begins a key of run.yaml or a line of the output, or names a file that a run writes."""
    folder = tmp_path / f"run{INJECTED}".replace("/", "")
    shutil.copytree(saved.path("stage 1"), folder)
    edit(MODEL, lambda file: (file.update(ds_version=f"0.19{INJECTED}", **{f"own{INJECTED}": 1}),
                              file["ds_config"].update(STRANGER)))(folder)
    (tmp_path / "config.json").write_text(json.dumps(saved.cases["stage 1"]["model"]))
    imported(folder, tmp_path / f"out{INJECTED}".replace("/", ""), monkeypatch, "--model",
             str(tmp_path / "config.json"), "--accept_without", "schedule")
    shown = capsys.readouterr().out
    assert not [line for line in shown.splitlines() if line.startswith("model_code")]
    out = next(tmp_path.glob("out*"))
    flags = yaml.safe_load((out / "run.yaml").read_text(encoding="utf-8"))
    assert set(flags) <= {"deepspeed_config", "save", "seq_length", "seed", "decay_vectors", "no_weight_decay"}
    assert flags["save"] == str(out)
    engine = torch.load(next(out.glob("checkpoints/*/mp_rank_00_model_states.pt")))
    for text in ((out / "ds_config.json").read_text(encoding="utf-8"), json.dumps(engine["ds_config"])):
        assert "stranger" not in text
        kept = json.loads(text)
        assert not kept.keys() & REPORTS.keys()
        assert kept["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 12345, "offload_optimizer": {
            "device": "cpu", "pin_memory": False}}
    assert REPORTS.keys() >= MONITORS.keys()
    listed = " ".join(" ".join(shown.split("JSON keys left out")[1:]).split())
    for key in (*REPORTS, "zero_optimization.offload_param", "zero_optimization.offload_optimizer.nvme_path"):
        assert key in listed, key


def test_a_link_of_a_stranger_is_not_followed(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a pipe nor a device is read, which might not end, and no file outside of the folder is copied."""
    secret = tmp_path / "secret"
    secret.write_text("{}")
    for name, path in (("fifo", MODEL), ("device", RANK_0), ("pipe of names", "latest")):
        shutil.copytree(saved.path("stage 1"), tmp_path / name)
        (tmp_path / name / path).unlink()
        if name == "device":
            (tmp_path / name / path).symlink_to("/dev/zero")
        else:
            os.mkfifo(tmp_path / name / path)
    for name in ("fifo", "device"):
        with pytest.raises(ConfigError, match="this is neither a file nor a folder"):
            saved.read("stage 1", tmp_path / name)
    assert saved.read("stage 1", tmp_path / "pipe of names").step == STEPS
    shutil.copytree(saved.path("Trainer"), tmp_path / "run")
    (tmp_path / "run/checkpoint-3/tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}))
    (tmp_path / "run/checkpoint-3/added_tokens.json").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"added_tokens\.json: this is a link to .*secret, outside of its folder"):
        imported(tmp_path / "run", tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()


def test_settings_of_other_classes_are_named(saved: Saved, tmp_path: Path) -> None:
    """Neither training_args.bin of any object, nor scheduler.pt without a count, is silently accepted."""
    for number, (file, content) in enumerate((("training_args.bin", argparse.Namespace(foo=1)), ("scheduler.pt", {}))):
        run = tmp_path / str(number)
        shutil.copytree(saved.path("Trainer"), run)
        torch.save(content, run / "checkpoint-3" / file)
        found = saved.read("Trainer", run)
        shown = [*found.notes, *(omission.reason for omission in found.omissions)]
        assert len(shown) == 1
        assert ("holds no TrainingArguments" in shown[0]) or ("has no count of steps" in shown[0])


def test_settings_that_no_json_can_have_are_rejected(saved: Saved, tmp_path: Path) -> None:
    cycle: dict[str, Any] = {}
    cycle["zero_optimization"] = cycle
    for number, (value, message) in enumerate((
            (cycle, "its settings are no JSON"), ({"optimizer": "AdamW"}, "ds_config"), ({"fp16": 1}, "ds_config"),
            ({str(key): 1 for key in range(2000)}, "expected at most 1000"))):
        run = tmp_path / str(number)
        shutil.copytree(saved.path("stage 1"), run)
        edit(MODEL, lambda file, value=value: file.update(ds_config=value))(run)  # type: ignore[misc]
        with pytest.raises(ConfigError, match=message if number in (0, 3) else "."):
            saved.read("stage 1", run)
