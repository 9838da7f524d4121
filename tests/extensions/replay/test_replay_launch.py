"""How a replay is started: not in a folder of the record, not on its hosts, and with few of its variables and flags.

tests/foreign_files/ runs such a replay in a sandbox.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pretrain.errors import ConfigError
from pretrain.extensions.replay.examine_step import Layout, train_again
from pretrain.extensions.replay.extension import ReplayOrder
from pretrain.extensions.replay.target import Target


def _target(folder: Path, hosts: int) -> Target:
    record = {
        "flags": {"save": "x", "train_data": "/data/x", "seed": 7, "notify_command": "touch x", "data_cache": "/x",
                  "nvme_path": "/x", "trackio": "x", "checkpoint_mirror": "s3://x/y", "eval_tasks_folder": "/x"},
        "layout": {"world_size": 2}, "model_config": {"model_type": "gpt2"},
        "given_deepspeed_config": {
            "train_batch_size": 4, "tensorboard": {"enabled": True, "output_path": "/x"}, "wandb": {"enabled": True},
            "flops_profiler": {"enabled": True, "output_file": "/x"}, "dump_state": True, "zero_optimization": {
                "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "hardware": [{"host": f"node{number}\nother", "ranks": 1} for number in range(hosts)],
        "environment": {"LD_PRELOAD": "/x.so", "NCCL_NET_PLUGIN": "x", "TORCH_EXTENSIONS_DIR": "/x",
                        "DS_ENV_FILE": "/x", "OMP_NUM_THREADS": "3", "NCCL_ALGO": "Ring"},
        "command": {"directory": str(folder / "hostile")}}
    return Target(folder / "run", 3, 0, record, None, 0, None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], dict[str, Any]]]:
    """The processes that would have been started. Each fails."""
    found: list[tuple[list[str], dict[str, Any]]] = []

    def run(words: list[str], **settings: Any) -> "subprocess.CompletedProcess[str]":
        found.append((words, settings))
        return subprocess.CompletedProcess(words, 1)

    monkeypatch.setattr("pretrain.extensions.replay.examine_step.subprocess.run", run)
    monkeypatch.delenv("DS_PRETRAIN_NVME_PATH", raising=False)
    (tmp_path / "hostile").mkdir()
    return found


def test_a_record_does_not_name_hosts(started: list[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--hostfile: the run trained on 2 hosts \(node0 other slots=1, node1 other "
                                          r"slots=1\); .*Give --hostfile"):
        train_again(tmp_path / "out", _target(tmp_path, 2), Layout(), ReplayOrder(3))
    assert started == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=2), Layout(is_here=True), Layout(hostfile=Path("my_hosts"))])
def test_what_a_replay_takes_from_the_record(layout: Layout, started: list[Any], tmp_path: Path) -> None:
    hosts = 1 if layout == Layout() else 2
    with pytest.raises(ConfigError, match="exit code 1"):
        train_again(tmp_path / "out", _target(tmp_path, hosts), layout, ReplayOrder(3))
    (words, settings), = started
    assert settings.get("cwd") is None, "the folder of the user"
    own = {name: value for name, value in settings["env"].items() if os.environ.get(name) != value}
    assert own == {"OMP_NUM_THREADS": "3", "NCCL_ALGO": "Ring", "DS_PRETRAIN_NEXT": "0",
                   "DS_PRETRAIN_NVME_PATH": str(tmp_path / "out/nvme")}
    assert ("--hostfile" in words) is (layout.hostfile is not None)
    flags = json.loads((tmp_path / "out/run.yaml").read_text())
    assert {"notify_command", "data_cache", "nvme_path", "trackio", "checkpoint_mirror"}.isdisjoint(flags)
    assert flags["train_data"] == "/data/x"
    config = json.loads((tmp_path / "out/deepspeed.json").read_text())
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "nvme", "nvme_path": "auto"}
    assert {"tensorboard", "wandb", "flops_profiler", "dump_state"}.isdisjoint(config)
