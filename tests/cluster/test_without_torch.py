"""The launcher that ds-pretrain runs without torch starts the same ranks as DeepSpeed's launcher does by itself."""

import base64
import json
import os
from pathlib import Path

import pytest

from tests.support.effort import run_and_list_imports
from tests.support.launch import ROOT

RANK = """
import json, os, sys, time
out = os.environ["OUT"]
with open(f"{out}/rank{os.environ['RANK']}.part", "w") as file:
    json.dump([dict(os.environ), sys.argv, sys.executable, sys.path[0]], file)
os.rename(file.name, file.name.replace(".part", ".json"))
while not all(os.path.exists(f"{out}/rank{rank}.json") for rank in (0, 1)):
    time.sleep(0.05)  # the launcher ends the other rank after the first failure
sys.exit(int(os.environ["CODE"]))
"""
LAUNCHER = "deepspeed.launcher.launch"
PLAIN, OURS = ["-m", LAUNCHER], [str(ROOT / "pretrain" / "cluster" / "without_torch.py"), LAUNCHER]
NOT_COMPARED = {"OUT", "PYTORCH_NVML_BASED_CUDA_CHECK"}  # the last one is set by each import of DeepSpeed


def launch(folder: Path, start: list[str], devices: list[int | str], code: int, *flags: str) \
        -> tuple[int, list[str], list[list], set[str]]:
    """Start a rank for each device. Return the exit code, the log's messages, the ranks' records, and the imports."""
    folder.mkdir()
    (folder / "rank.py").write_text(RANK)
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    done, imported = run_and_list_imports(
        [*start, f"--world_info={world}", "--master_addr=127.0.0.1", "--master_port=29501", *flags, "rank.py", "--flag",
         "a b"], cwd=folder, timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OUT": str(folder), "CODE": str(code)})
    records = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(devices))]
    for record in records:
        record[0] = {name: value for name, value in record[0].items() if name not in NOT_COMPARED}
        record[3] = Path(record[3]).relative_to(folder).as_posix()
    messages = [line.partition("] [launch.py:")[2].partition("] ")[2] for line in done.stdout.splitlines()
                if "] [launch.py:" in line and "process" not in line and "Process" not in line]
    return done.returncode, messages, records, imported


def test_ranks_and_log_are_those_of_deepspeeds_launcher(tmp_path: Path) -> None:
    plain = launch(tmp_path / "plain", PLAIN, ["GPU-abc", 3], 0, "--log_level=info")
    ours = launch(tmp_path / "ours", OURS, ["GPU-abc", 3], 0, "--log_level=info")
    assert ours[:3] == plain[:3]
    assert ours[0] == 0
    assert ours[2][1][0]["CUDA_VISIBLE_DEVICES"] == "GPU-abc,3"
    assert len(ours[1]) > 3
    assert "torch" in plain[3], "DeepSpeed's launcher no longer imports torch: delete pretrain/cluster/without_torch.py"
    assert not {"torch", "numpy", "deepspeed.runtime"} & ours[3]


MORE_NAMES = """
from pretrain.cluster import without_torch
package = without_torch._package
without_torch._package = lambda name, folders, **names: package(
    name, folders, **{key: value for key, value in names.items() if key != "logger"})
del without_torch._Accelerator.visible_devices_envs
del sys.argv[0]
without_torch._launcher()()
"""


@pytest.mark.parametrize("code", [MORE_NAMES, MORE_NAMES.replace('"logger"', '""')],
                         ids=["import", "call"])
def test_a_launcher_that_needs_more_names_imports_deepspeed(tmp_path: Path, code: str) -> None:
    ours = launch(tmp_path / "ours", ["-c", f"import sys\n{code}", LAUNCHER], [0, 1], 0, "--log_level=info")
    assert ours[0] == 0
    assert len(ours[1]) > 3
    assert "torch" in ours[3]


def test_the_exit_code_is_that_of_the_failed_rank(tmp_path: Path) -> None:
    code, messages, records, _ = launch(tmp_path / "ours", OURS, [0, 1], 75, "--log_level=critical")
    assert (code, messages, len(records)) == (75, [], 2)


def test_only_the_launcher_can_be_run() -> None:
    done, _ = run_and_list_imports([OURS[0], "deepspeed.launcher.runner"])
    assert done.returncode == 1
    assert LAUNCHER in done.stderr
