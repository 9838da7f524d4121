"""tools/check_config.py: what it imports, and the plans of valid inputs. tests/wrong_inputs has the wrong ones."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.commands.check import main as check
from pretrain.config.ds_json.read import get_value
from pretrain.config.flags.arguments import RunArguments
from pretrain.config.plan import Plan
from pretrain.config.validate import check_run
from pretrain.distributed.device import Device, cpu_device, detect_device
from pretrain.distributed.requirements import deepspeed_version
from pretrain.errors import ConfigError
from tests.support.effort import HEAVY, run_and_list_imports
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


def test_the_device_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert detect_device() == cpu_device()
    assert cpu_device().bf16
    assert cpu_device().memory_bytes > 2**28


def test_notes_name_validation_data_that_the_model_has_seen(world: Path) -> None:
    plan = plan_of(world, {}, valid_data=str(world / "corpus"))
    assert any(f"{world / 'corpus'} is training data and validation data" in note for note in plan.notes)


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
