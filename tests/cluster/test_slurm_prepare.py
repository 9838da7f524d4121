"""launch/slurm/prepare.sbatch on a SLURM cluster of two nodes on this machine: an array of shards, and their merge."""

import json
from pathlib import Path

import pytest

from pretrain.data.prepare.partial_output import read_state
from pretrain.data.prepare.prepare import prepare
from pretrain.data.prepare.shards import Shard
from pretrain.shipped import find_template
from tests.cluster.workers.slurm_cluster import SlurmCluster, slurm
from tests.data.prepare.helpers import content
from tests.support.supervised import wait_until

__all__ = ["slurm"]  # the fixture
# A module that Python imports at its start: a state is saved after each batch of 20 kB, and then shard 1 waits for the
# test to delete a file.
_SLOW = """
import os, pathlib, time
import pretrain.data.prepare.partial_output as partial_output
import pretrain.data.text_inputs.reader as reader
reader.CHUNK_BYTES = 20_000
partial_output._SECONDS_BETWEEN_STATES, partial_output._LARGEST_COST = 0.0, float("inf")
save = partial_output.PartialOutput.save
def save_slowly(output, state):
    save(output, state)
    while "shard-00001" in str(output.path) and pathlib.Path(os.environ["HOLD"]).exists():
        time.sleep(0.05)
partial_output.PartialOutput.save = save_slowly
"""


@pytest.mark.root
def test_an_array_of_shards_with_a_requeued_and_a_lost_one(slurm: SlurmCluster,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 1 is killed, and requeued. Shard 2 is lost; the merge names it, and its task alone makes it again."""
    folder, script = slurm.folder, str(find_template("slurm-prepare"))
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(_SLOW)
    hold = folder / "hold"
    hold.touch()
    (folder / "text.jsonl").write_text("".join(
        json.dumps({"text": f"document {number} " * 40}) + "\n" for number in range(1000)))
    words = ["text.jsonl", "--tokenizer", "bytes", "--out", "data/corpus"]
    environ = {"PYTHONPATH": str(folder / "slow"), "HOLD": str(hold), "OMP_NUM_THREADS": "1"}
    one, two = (str(folder / Shard(index, 3).prefix("data/corpus")) for index in (1, 2))

    def log(job: str) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("prepare-*.log"))) + job

    array = slurm.submit("--array=0-2", "--job-name=prepare", script, *words, **environ)
    merge = slurm.submit(f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes", script, "merge", "data/corpus")
    task = f"{array}_1"
    wait_until(lambda: read_state(one) is not None, lambda: log(array))
    slurm.run("scontrol", "requeue", task)  # as after the loss of its node: SLURM kills it
    wait_until(lambda: "continues the preparation" in log(array), lambda: log(array))
    slurm.run("scancel", "--signal=USR1", "--batch", task)  # SLURM sends the same before the time limit
    wait_until(lambda: "the task goes back to the queue" in log(array), lambda: log(array))
    assert slurm.state(merge) == "PENDING"
    hold.unlink()
    for index in range(3):
        slurm.wait_for(f"{array}_{index}", "COMPLETED")
    slurm.wait_for(merge, "COMPLETED")
    monkeypatch.chdir(folder)  # the summary has the path of the input
    prepare(["text.jsonl"], tokenizer="bytes", out="single", workers=1)
    merged = content(folder / "data" / "corpus")
    assert merged == content(folder / "single")

    for path in folder.glob("data/corpus.shard-00002-of-00003.*"):
        path.unlink()
    lost = slurm.submit(script, "merge", "data/corpus", "--overwrite")
    slurm.wait_for(lost, "FAILED")
    assert slurm.exit_code(lost) == 2
    assert "error: 1 shard of 3: shard 2/3: it does not exist. Run `ds-pretrain prepare text.jsonl" in log(lost)
    again = slurm.submit("--array=2", script, *words, SHARDS="3")
    slurm.wait_for(f"{again}_2", "COMPLETED")
    assert Path(f"{two}.idx").exists()
    last = slurm.submit(f"--dependency=afterok:{again}", script, "merge", "data/corpus", "--overwrite")
    slurm.wait_for(last, "COMPLETED")
    assert content(folder / "data" / "corpus") == merged


@pytest.mark.root
def test_the_script_without_an_array(slurm: SlurmCluster) -> None:
    job = slurm.submit("--job-name=alone", str(find_template("slurm-prepare")), "text.jsonl")
    slurm.wait_for(job, "FAILED")
    assert slurm.exit_code(job) == 2
    assert "this is no array job" in (slurm.folder / f"alone-{job}.log").read_text()
