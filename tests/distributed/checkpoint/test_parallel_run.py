"""A run of train.py under tensor parallelism: saved in the background, mirrored, read by the tools, and continued."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.manifest import newest_good
from pretrain.checkpoint.format.verify import find_damage
from pretrain.monitor.read_run_folder import read_metrics, read_rows
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.cases import config, flags
from tests.support.conversion_faults import run_tool
from tests.support.launch import train_ranks
from tests.support.layouts import relative_difference, sequence2, tensor2

STEPS, SAVED = 6, 3
# name -> ranks, DeepSpeed JSON, flags of the run that continues
CONTINUED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one_rank": (1, config(0), {}),
    "same_layout": (2, tensor2(1), {}),
    "sequence2_zero3": (2, sequence2(3), {}),
    "branch": (2, tensor2(3), {"resume_from": "run@3"}),
}
pytestmark = pytest.mark.slow


def _train(folder: Path, name: str, ranks: int, values: dict[str, Any], run_flags: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(values))
    words = [f"--{key}={value}" for key, value in {
        **run_flags, "deepspeed_config": f"{name}.json", "save": name, "log_interval": 1}.items()]
    done = train_ranks(ranks, words, folder)
    assert all(process.returncode == 0 for process in done), "\n".join(process.stdout[-3000:] for process in done)


def _rows(run: Path) -> dict[str, dict[int, float]]:
    rows = [row for row in read_metrics(run) if "loss" in row]
    return {key: {row["step"]: row[key] for row in rows} for key in ("loss", "grad_norm", "param_norm")}


@pytest.fixture(scope="module")
def base(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the run "run", and with a run for each entry of CONTINUED."""
    folder = tmp_path_factory.mktemp("parallel_run")
    run_flags = flags(corpus, steps=STEPS)
    _train(folder, "run", 2, tensor2(1), {**run_flags, "save_interval": SAVED, "async_save": True,
                                          "checkpoint_mirror": str(folder / "mirror")})
    for name, (ranks, values, others) in CONTINUED.items():
        if not others:
            shutil.copytree(folder / "run", folder / name)
            shutil.rmtree(folder / name / "checkpoints" / f"global_step{STEPS}")
        _train(folder, name, ranks, values, {**run_flags, **others})
    return folder


def test_the_checkpoints_and_their_copies_are_complete(base: Path) -> None:
    for checkpoints in (base / "run" / "checkpoints", base / "mirror"):
        found = newest_good(checkpoints)
        assert found is not None
        folder, manifest, _ = found
        assert (manifest.step, manifest.finite) == (STEPS, True)
        assert (manifest.tensor_parallel_size, manifest.data_parallel_size) == (2, 1)
        assert find_damage(folder, manifest) == []
    listed = run_tool("checkpoint.py", "list", base / "run")
    assert "2 ranks, ZeRO-1, 2 tensor-parallel x 1 data-parallel" in listed.stdout
    assert run_tool("checkpoint.py", "verify", base / "run").returncode == 0


@pytest.mark.parametrize("name", CONTINUED)
def test_the_run_continues(name: str, base: Path) -> None:
    expected, found = _rows(base / "run"), _rows(base / name)
    steps = range(SAVED + 1, STEPS + 1)
    for key in expected:
        assert relative_difference([found[key][step] for step in steps], [expected[key][step] for step in steps]) <= \
            (0 if name == "same_layout" else 1e-5), key
    events = [row["event"] for row in read_rows(base / name / "events.jsonl")]
    assert "resume" in events or "branch" in events, events


def test_tools_read_the_run(base: Path) -> None:
    found = []
    for name in ("run", "one_rank"):
        out = base / f"{name}-evaluation.json"
        done = run_tool("evaluate.py", base / name, "--json", out)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(out.read_text())["data"][0]["loss"])
    assert relative_difference(found[:1], found[1:]) <= 1e-5
    for tool, *words in (
            ("average_checkpoints.py", base / "run", "--last", "2", "--output", base / "average"),
            ("generate.py", base / "run", "--prompt", "a", "--max_new_tokens", "4", "--tokenizer",
             write_byte_tokenizer(base, with_eod=False)),
            ("export_hf.py", base / "run", "--output", base / "exported"),
            ("checkpoint.py", "convert", base / "run", base / "universal" / f"global_step{STEPS}")):
        done = run_tool(tool, *words)
        assert done.returncode == 0, (tool, done.stdout + done.stderr)
