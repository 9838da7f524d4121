"""The script that repeats a start: a foreign run.json is never code, and nothing of it acts outside of the new run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.ds_json.schema import TREE
from pretrain.config.flags.arguments import FLAGS
from pretrain.extensions.report.repeat_command import command_of
from pretrain.monitor.read_run_folder import read_starts
from pretrain.monitor.repeatable import (
    NEVER_REPEATED,
    REPEATED_BLOCKS,
    REPEATED_FLAGS,
    SET_AGAIN,
    repeated_config,
    repeated_flags,
)
from tests.distributed.checkpoint.test_steered_run import Runs
from tests.support.launch import ROOT


def _record(text: str, **others: Any) -> dict[str, Any]:
    host = {"host": text, "ranks": text, "gpus": [], "cores": text, "cpu": text}
    return {"time": 0.0, "flags": {"save": text, "seed": text}, "given_deepspeed_config": {text: text},
            "model_config": {"model_type": text}, "layout": {"world_size": 2}, "hardware": [host, host],
            "git_commit": text, "code": {"diff": text}, "versions": {text: text},
            "environment": {text: text, "OMP_NUM_THREADS": text, "PATH": "/none"},
            "command": {"directory": text}, **others}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of a shell whose ds-pretrain prints its words, its folder and its environment."""
    program = tmp_path / "bin" / "ds-pretrain"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "repeated $*"\npwd\nenv -0 > "$CAPTURED"\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}", "CAPTURED": str(tmp_path / "captured")}


def test_text_of_the_record_is_not_executed(tmp_path: Path, environ: dict[str, str]) -> None:
    trap = tmp_path / "executed"
    texts = [f"$(touch {trap})", f"`touch {trap}`", f"x\ntouch {trap}", f"'; touch {trap}; '", f'"; touch {trap}; "',
             f"END_OF_FILE\ntouch {trap}"]
    for text in texts:
        script = tmp_path / "repeat.sh"
        script.write_text(command_of(_record(text), tmp_path / "run"))
        for arguments in ([], [str(tmp_path / "new")]):
            done = subprocess.run(["sh", str(script), *arguments], capture_output=True, text=True, cwd=tmp_path,
                                  env={**environ, "HOSTFILE": "my hosts"})
            assert done.stdout.startswith("repeated --hostfile my hosts --config"), (text, done.stderr)
            assert done.stdout.splitlines()[1] == str(tmp_path), "it stays in the folder of the user"
            assert not trap.exists(), text
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert "HOSTFILE" in done.stderr, "a record alone names no hosts"
    assert "repeated" not in done.stdout


def test_each_flag_is_repeated_or_has_a_reason() -> None:
    lists = [REPEATED_FLAGS, SET_AGAIN, NEVER_REPEATED.keys()]
    assert sorted(name for each in lists for name in each) == sorted(FLAGS)
    assert TREE.keys() > REPEATED_BLOCKS


def test_only_names_of_the_lists_are_repeated(tmp_path: Path, environ: dict[str, str]) -> None:
    """Each flag, a thousand variables and each block of the JSON have a value that is found again if it is repeated."""
    marked = {name: f"MARK-{name}" for name in FLAGS}
    names = [f"{prefix}{name}" for prefix in ("NCCL_", "CUDA_", "OMP_", "DS_", "TORCH_", "PYTORCH_", "MALLOC_", "GLOO_",
                                              "UCX_", "TRITON_", "DEEPSPEED_", "PYTHON", "LD_")
             for name in ("EXTENSIONS_DIR", "NET_PLUGIN", "CACHE_DIR", "CONF", "PRELOAD", "PATH", "HOME", "TOPO_FILE",
                          "ENV_FILE", "CPP_LOG_LEVEL", "SOCKET_IFNAME", "PRETRAIN_SECRET", "CONF_FILE", "TUNER_PLUGIN")]
    variables = {**{name: f"MARK-{name}" for name in names}, "OMP_NUM_THREADS": "3", "NCCL_ALGO": "/lib/x.so"}
    config = {name: {"output_path": f"MARK-{name}"} for name in TREE}
    config["zero_optimization"] = {"offload_optimizer": {"device": "nvme", "nvme_path": "/MARK-nvme"}}
    record = _record("x", flags=marked, environment=variables, given_deepspeed_config=config)
    text = command_of(record, tmp_path / "run")
    done = subprocess.run(["sh", "-s"], input=text, capture_output=True, text=True, cwd=tmp_path,
                          env={**environ, "HOSTFILE": "h"})
    assert done.returncode == 2, "own code is missing"
    script = text.replace("${2:?the dataset_module that the first lines name}", "a:b").replace(
        "${3:?the model_code that the first lines name}", "c:d").replace(
        "${4:?the loss that the first lines name}", "e:f")
    subprocess.run(["sh", "-s"], input=script, capture_output=True, text=True, cwd=tmp_path, check=True,
                   env={**environ, "HOSTFILE": "h"})
    files = tmp_path / "run-repeat-files"
    found = set(re.findall(r"MARK-(\w+)", (files / "run.yaml").read_text()))
    assert found == REPEATED_FLAGS - {"override"}
    assert json.loads((files / "deepspeed.json").read_text()).keys() == REPEATED_BLOCKS
    assert "MARK-nvme" not in (files / "deepspeed.json").read_text()
    exported = (tmp_path / "captured").read_text()
    assert "MARK" not in exported
    assert "OMP_NUM_THREADS=3" in exported
    assert "NCCL_ALGO" not in exported, "a value with a path"
    remarks = [line for line in text.splitlines() if line.startswith("# Left out: --")]
    assert any("--notify_command" in line and "MARK-notify_command" in line for line in remarks)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "bin", tmp_path / "captured", files])


def test_values_of_0_are_repeated() -> None:
    flags = {"save": "x", "weight_decay": 0.0, "eval_interval": 0, "lr_warmup_steps": 0, "tf32": False, "note": None}
    assert repeated_flags(_record("x", flags=flags)) == {"weight_decay": 0.0, "eval_interval": 0, "lr_warmup_steps": 0}


def test_relative_paths_are_those_of_the_folder_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    record = _record("x", command={"directory": str(tmp_path)}, flags={"save": "x", "init_from": "weights"})
    assert repeated_flags(record)["init_from"] == str(tmp_path / "weights")
    record["flags"]["init_from"] = "org/name"
    assert repeated_flags(record)["init_from"] == "org/name"


def test_the_json_of_the_record_is_repeated_with_the_folder_of_the_user() -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": "/foreign", "pin_memory": True}}
    record = _record("x", given_deepspeed_config={"zero_optimization": {"stage": 3, **offload}, "wandb": {"team": "x"}})
    offload["offload_optimizer"]["nvme_path"] = "auto"
    assert repeated_config(record) == {"zero_optimization": {"stage": 3, **offload}}


def test_the_record_repeats_a_start(tmp_path: Path, corpus: str) -> None:
    """Run the script of the start that resumed: it has the same configuration, and gives the same losses."""
    runs = Runs(tmp_path, corpus)
    runs.start("run", "--train_steps", "4")
    runs.start("run", "--train_steps", "6")
    record = read_starts(runs.folder / "run")[1]
    script = runs.folder / "repeat.sh"
    script.write_text(command_of(record, runs.folder / "run"))
    environ = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
               "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", str(script), str(runs.folder / "repeated")], env=environ, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.losses("repeated") == runs.losses("run")[4:]
