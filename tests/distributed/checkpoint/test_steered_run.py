"""A run that is resumed for longer, branched, changed, and repeated from its record. Real starts of one rank."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_rows, read_starts
from tests.support.launch import ROOT, tails, train_ranks

Losses = list[tuple[int, float, float]]


class Runs:
    """Starts of runs in one folder, and their logged losses."""

    def __init__(self, folder: Path, corpus: str) -> None:
        self.folder, self.corpus = folder, corpus

    def start(self, name: str, *more: str, code: int = 0) -> str:
        """Start a run of one rank, and return its output."""
        log = self.folder / "logs"
        log.mkdir(exist_ok=True)
        model = "vocab_size=256,n_layer=1,n_embd=16,n_head=2,n_positions=64,resid_pdrop=0.1"
        words = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero2_bf16.json"), "--model", "tiny",
                 "--model_overrides", model, "--train_data", self.corpus, "--split", "80,20,0", "--seq_length", "32",
                 "--micro_batch_size", "4", "--log_interval", "1", "--eval_interval", "0", "--eval_steps", "1",
                 "--save_interval", "2", "--learning_rate", "1e-2", "--save", str(self.folder / name), *more]
        done = train_ranks(1, words, log, WANDB_API_KEY="secret", NCCL_DEBUG="WARN")[0]
        assert done.returncode == code, tails(log, 1)
        return done.stdout

    def losses(self, name: str) -> Losses:
        return [(row["step"], row["loss"], row["lr"]) for row in read_rows(self.folder / name / "metrics.jsonl")
                if "loss" in row]

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_rows(self.folder / name / "events.jsonl") if row["event"] == kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Runs:
    """Train 4 steps, then 6, and a branch from step 4 that ends after 6 steps."""
    found = Runs(tmp_path_factory.mktemp("steered"), corpus)
    found.start("run", "--train_steps", "4")
    found.start("run", "--train_steps", "6")
    before = _files(found.folder / "run")
    found.start("branch", "--train_steps", "6", "--resume_from", f"{found.folder / 'run'}@4", "--checkpoint_mirror",
                str(found.folder / "mirror"), "--keep_checkpoints", "2")
    assert _files(found.folder / "run") == before, "the other run's folder was changed"
    return found


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_a_longer_run_trains_on_at_the_lowest_rate(runs: Runs) -> None:
    assert [rate for _, _, rate in runs.losses("run")][3:] == pytest.approx([1e-3, 1e-3, 1e-3])


def test_a_branch_is_bit_exact_and_has_its_lineage(runs: Runs) -> None:
    assert runs.losses("branch") == runs.losses("run")[4:]
    weights = [sorted((runs.folder / name / "checkpoints" / "global_step6").glob("*optim_states.pt"))[0].read_bytes()
               for name in ("run", "branch")]
    assert weights[0] == weights[1]
    event, = runs.events("branch", "branch")
    source = runs.folder / "run"
    assert (event["run"], event["step"]) == (str(source), 4)
    lineage = [{key: event[key] for key in ("run", "step", "folder", "fingerprint")}]
    manifest = json.loads((runs.folder / "branch" / "checkpoints" / "global_step6" / "manifest.json").read_text())
    assert manifest["lineage"] == lineage
    assert read_starts(runs.folder / "branch")[0]["lineage"] == lineage
    assert runs.events("branch", "resume") == []


def test_the_same_command_resumes_the_branch_also_from_its_mirror(runs: Runs) -> None:
    branched = ["--resume_from", f"{runs.folder / 'run'}@4", "--checkpoint_mirror", str(runs.folder / "mirror")]
    assert "is complete: 6 of 6" in runs.start("branch", "--train_steps", "6", *branched)
    assert "global_step6 is beyond the last step of the run, which is 5 (--train_steps): there is nothing to train" in \
        runs.start("branch", "--train_steps", "5", *branched)
    shutil.rmtree(runs.folder / "branch")
    changed = ["--train_steps", "8", "--learning_rate", "3e-2", "--override", "lr,schedule", *branched]
    assert "resumed from " in runs.start("branch", *changed, "--exit_step", "7")
    rate = 3e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 6 / 7)))
    assert runs.losses("branch")[0][2] == pytest.approx(rate)
    overrides = runs.events("branch", "override")
    assert [(row["name"], row["step"]) for row in overrides] == [("lr", 6), ("schedule", 6)]
    assert (overrides[0]["from"], overrides[0]["to"]) == (0.01, 0.03)
    assert [each["name"] for each in read_starts(runs.folder / "branch")[-1]["overrides"]] == ["lr", "schedule"]
    # a requeued job repeats its command
    output = runs.start("branch", *changed)
    assert "--override" not in output
    assert len(runs.events("branch", "override")) == 2
    assert runs.losses("branch")[-1][2] == pytest.approx(3e-3)


def test_a_damaged_source_is_rejected(runs: Runs) -> None:
    shutil.copytree(runs.folder / "run" / "checkpoints" / "global_step2", runs.folder / "global_step2")
    file = next((runs.folder / "global_step2").glob("*optim_states.pt"))
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    output = runs.start("third", "--train_steps", "6", "--resume_from", str(runs.folder / "global_step2"), code=2)
    line, = [line for line in output.splitlines() if "error" in line]
    assert f"--resume_from {runs.folder / 'global_step2'}: " in line
    assert file.name in line
    assert not list((runs.folder / "third").glob("checkpoints/global_step*"))


def test_the_record_names_what_a_result_depends_on(runs: Runs) -> None:
    record = read_starts(runs.folder / "run")[0]
    assert record["command"]["words"][-2:] == ["--train_steps", "4"]
    assert record["command"]["directory"] == str(runs.folder / "logs")
    assert record["environment"]["NCCL_DEBUG"] == "WARN"
    assert record["environment"]["OMP_NUM_THREADS"] == "1"
    assert "secret" not in json.dumps(record)
    host, = record["hardware"]
    assert (host["host"], host["ranks"]) == (record["hosts"][0], 1)
    assert host["memory_bytes"] > 2**28
    assert host["cores"] >= 1
    assert record["software"]["packages"].keys() >= {"numpy", "tokenizers", "psutil"}
    assert record["seed"] == 1234
    assert record["schedule"]["decay_steps"] == 4
    assert record["code"]["commit"] == record["git_commit"]
