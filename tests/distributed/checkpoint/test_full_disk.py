"""Real runs of two ranks on disks that are or become full, and runs whose output cannot be written. One launch."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.run_checkpoints import read_manifest
from tests.distributed.checkpoint.test_saver import SAVE_MODES, STEPS, CaseList, events, log, losses
from tests.support.cases import config
from tests.support.launch import run_forked

DISKS = {"one_fits": 4096, "filled": 12_288}  # KiB; "filled" has space for three checkpoints
FILL_LEVELS = [0, 0.2, 0.5, 0.8, 0.95]  # free space while a save writes, as a fraction of a checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("full")


@pytest.fixture(scope="module")
def disks(folder: Path) -> Iterator[dict[str, Path]]:
    """Mount file systems of the sizes in DISKS; a checkpoint has 3.54 MB. Returns {} if mounting is not allowed."""
    mounted = {}
    for name, size in DISKS.items():
        (path := folder / f"disk_{name}").mkdir()
        if os.geteuid() == 0 and not subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(path)],
                                                    check=False, capture_output=True).returncode:
            mounted[name] = path
    yield mounted
    for path in mounted.values():
        subprocess.run(["umount", "-l", str(path)], check=True)


def _monitors(folder: Path) -> dict[str, Any]:
    """Return a JSON's entries for two monitors that write below a folder."""
    return {name: {"enabled": True, "output_path": str(folder / path), "job_name": "job"}
            for name, path in (("tensorboard", "tensorboard"), ("csv_monitor", "csv"))}


def _add_disk_cases(cases: CaseList, disks: dict[str, Path]) -> None:
    for mode, more in SAVE_MODES:
        cases.run(f"one_fits {mode}", disks["one_fits"] / f"one_fits_{mode}", **more)
        cases.shell(f"cp -r {disks['one_fits']}/one_fits_{mode} .; rm -rf {disks['one_fits']}/one_fits_{mode}")
        cases.run(f"filled {mode}", disks["filled"] / f"filled_{mode}", save_interval=1,
                  train_steps=len(FILL_LEVELS) + 2, deepspeed_config="ds_monitors.json", **more)
        cases.cases[-1] |= {"disk": str(disks["filled"]), "fill": FILL_LEVELS}
        cases.shell(f"cp -r {disks['filled']}/filled_{mode} .; mv {disks['filled']}.saves filled_{mode}.saves; "
                    f"rm -rf {disks['filled']}/*")


def _add_lost_output_case(cases: CaseList) -> None:
    """Add a run whose log is on a full disk, and whose files become folders after its start."""
    replace = ("for name in run.json events.jsonl metrics.jsonl; do path=lost_output/$name; "
               "until [ -f $path ]; do sleep 0.01; done; until rm -f $path; mkdir $path; do :; done; done")
    cases.shell("mkdir -p lost_output/csv; touch lost_output/csv/job; "
                f"timeout 600 sh -c '{replace}' > /dev/null 2>&1 &")
    cases.run("lost output", "lost_output", deepspeed_config="ds_lost_output.json", eval_interval=3)
    cases.cases[-1]["output"] = "/dev/full"


@pytest.fixture(scope="module")
def results(corpus: str, folder: Path, disks: dict[str, Path]) -> dict[str, Any]:
    """Return the exit codes of all runs by case name."""
    (folder / "ds.json").write_text(json.dumps(config(1, precision="bf16")))
    for name, monitored in (("ds_monitors", disks.get("filled", folder)), ("ds_lost_output", folder / "lost_output")):
        (folder / f"{name}.json").write_text(json.dumps({**config(1, precision="bf16"), **_monitors(monitored)}))
    cases = CaseList(corpus, folder)
    cases.run("reference", "reference")
    _add_lost_output_case(cases)
    if disks:
        _add_disk_cases(cases, disks)
    return run_forked(cases.cases, folder)


@pytest.fixture
def mounted(disks: dict[str, Path]) -> None:
    if not disks:
        pytest.skip("no tmpfs can be mounted here")


@pytest.mark.root
@pytest.mark.usefixtures("mounted")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_damages_no_checkpoint(results: dict[str, Any], folder: Path, mode: str) -> None:
    assert results[f"one_fits {mode}"]["status"] == [1, 1]
    run = folder / f"one_fits_{mode}"
    assert [row["step"] for row in events(run, "save")] == [2]
    failed = events(run, "save_failed")
    assert [row["step"] for row in failed] == [4, 6]
    assert all("bytes needed" in row["reason"] for row in failed)
    assert set(losses(run)) == set(range(1, STEPS + 1)), "training stopped after a failed save"
    assert [path.name for path in (run / "checkpoints").glob("*global_step*")] == ["global_step2"]
    lines = [line for line in log(run).splitlines() if "error: " in line]
    assert len(lines) == 1


@pytest.mark.root
@pytest.mark.usefixtures("mounted")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_fills_up_during_a_save(results: dict[str, Any], folder: Path, mode: str) -> None:
    """At each fill level the save fails on all ranks, leaves nothing behind, and training continues."""
    assert results[f"filled {mode}"]["status"] == [0, 0]
    last = len(FILL_LEVELS) + 2
    # before each save: steps of complete checkpoints, damage, temporary folders
    before = (folder / f"filled_{mode}.saves").read_text().splitlines()
    assert before == ["[] [] []"] + ["[1] [] []"] * (last - 1)
    text = log(folder / f"filled_{mode}")
    print(text)
    failed = [line for line in text.splitlines() if "warning: save failed at step" in line]
    assert [int(line.split(" at step ")[1].partition(":")[0]) for line in failed] == list(range(2, last))
    assert all("No space left" in line for line in failed)
    steps = [line.split("  lr ")[0] for line in text.splitlines() if line.startswith("step ") and "  lr " in line]
    assert len(steps) == last
    assert "Traceback" not in text
    assert sorted(path.name for path in (folder / f"filled_{mode}/checkpoints").glob("*global_step*")) == [
        "global_step1", f"global_step{last}"]


def test_lost_output_does_not_stop_a_run(results: dict[str, Any], folder: Path) -> None:
    """The log is on a full disk, the run's files have become folders, and a monitor cannot be made."""
    assert results["lost output"]["status"] == [0, 0]
    run = folder / "lost_output"
    assert all((run / name).is_dir() for name in ("run.json", "events.jsonl", "metrics.jsonl"))
    saved, reference = (read_manifest(folder / name / "checkpoints" / f"global_step{STEPS}")
                        for name in ("lost_output", "reference"))
    assert saved.finite is True
    weights = [name for name in saved.files if name.startswith("layer")]
    assert weights
    assert [saved.files[name] for name in weights] == [reference.files[name] for name in weights]
