"""`ds-pretrain inspect` shows exactly the tensors that real ranks trained on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.errors import ConfigError
from pretrain.extensions.inspect.main import find_step
from pretrain.extensions.inspect.step import StepTensors, check_labels, read_step, step_lines
from tests.support.cases import config, flags
from tests.support.launch import PROGRAM, WORKERS, run_ranks


@pytest.fixture(scope="module")
def folder(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on two ranks that was resumed after step 4, with another micro-batch size.

    The first two steps have 8 samples, the others 16. Some samples are left out, and the second start reads some in
    another order.
    """
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "batches").mkdir()
    run_flags = {**flags(corpus, steps=6, log_interval=4), "seq_length_schedule": "0:16,2048:64",
                 "skip_samples": "11,26:29,80",
                 "batch_schedule": "0:8,1e3:16",
                 "save": folder / "run"}
    for micro, exit_step, more in ((4, 4, []), (2, 6, ["--reorder_samples=52:90", "--override=samples"])):
        path = folder / f"{micro}.json"
        path.write_text(json.dumps(config(1, micro=micro, accumulation=8 // micro)))
        words = [f"--{name}={value}" for name, value in {**run_flags, "deepspeed_config": path,
                                                         "exit_step": exit_step}.items()] + more
        done = run_ranks([str(WORKERS / "recorded_batches.py"), str(folder / "batches"), *words], 2, cwd=folder)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    return folder


def _read(run: Path, step: int) -> StepTensors:
    position = find_step(run, step)
    return read_step(position, open_data_of_step(run, position.start))


def _flat(batches: Any) -> list[torch.Tensor]:
    return [part for inputs, (labels, weights) in batches for part in (inputs, labels, weights)]


@pytest.mark.parametrize(("step", "micro"), [(1, 4), (2, 4), (3, 4), (4, 4), (5, 2), (6, 2)])
def test_the_tensors_are_those_of_the_ranks(folder: Path, step: int, micro: int) -> None:
    found = _read(folder / "run", step)
    assert (found.ranks, found.micro_batch_size) == (2, micro)
    assert check_labels(found.batches) == []
    for rank in range(2):
        trained = torch.load(folder / "batches" / f"{step}_{rank}.pt")
        assert len(trained) == (4 if step <= 2 else 8) // micro
        for expected, shown in zip(_flat(trained), _flat(found.batches[rank::2]), strict=True):
            assert torch.equal(expected, shown)


def test_the_tool_shows_every_position(folder: Path) -> None:
    done = subprocess.run([sys.executable, PROGRAM, "inspect", "step", str(folder / "run"), "2",
                           "--samples", "1", "--tokens", "16"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "step 2: samples 8:11,12:17; 2 data-parallel ranks, each 1 micro-batch of 16 sequences of " \
        "16 tokens"
    assert lines[1] == "512 of 512 labels count; each of them is the next token of its sequence"
    tokens_BT, (labels_BT, _) = torch.load(folder / "batches" / "2_0.pt")[0]
    shown = [line.split()[:3] for line in lines if "  yes  " in line]
    assert len(shown) == 4 * 16, "the sample is divided into 4 sequences"
    assert [int(token) for _, token, _ in shown] == tokens_BT[:4].flatten().tolist()
    assert [int(label) for _, _, label in shown] == labels_BT[:4].flatten().tolist()


def test_wrong_labels_are_found(folder: Path) -> None:
    found = _read(folder / "run", 1)
    found.batches[1][1][0][3, 5] += 1
    problems = check_labels(found.batches)
    assert len(problems) == 1
    assert problems[0].startswith("micro-batch 1, sequence 3: the label at position 5 is ")
    assert "each of them is NOT the next token" in step_lines(found, problems, samples=0, tokens=0)[1]


def test_steps_that_were_not_trained_and_changed_data_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"STEP 7: .* has logged the steps 1 to 6"):
        _read(folder / "run", 7)
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("metrics.jsonl", "events.jsonl"):
        (copy / name).write_text((folder / "run" / name).read_text())
    starts = json.loads((folder / "run" / "run.json").read_text())
    starts[0]["data"]["train"] = "0" * 64
    (copy / "run.json").write_text(json.dumps(starts))
    with pytest.raises(ConfigError, match="its training data has changed"):
        _read(copy, 1)
    assert len(_read(copy, 6).batches) == 8
