"""Damaged JSON files of a real run folder: no traceback and no hang, and an older good checkpoint is used."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from pretrain.checkpoint.format.manifest import Manifest, _with_hash
from pretrain.checkpoint.save.retention import Rollback
from pretrain.cluster.slurm_job import JobStart
from tests.checkpoint.test_commit import manifest
from tests.support.cases import flags
from tests.support.checkpoints import STEPS, real_run
from tests.support.launch import ROOT
from tests.wrong_inputs.case import RAW
from tests.wrong_inputs.stored import KINDS, MANIFEST, READERS

Outcome = tuple[str, str, str, str]  # file, change, program, outcome


def outcomes(corpus: str, factory: pytest.TempPathFactory, *words: str) -> list[Outcome]:
    made = real_run("zero1", corpus, factory)
    folder = factory.mktemp("stored")
    run = Path(shutil.copytree(made, folder / "run"))
    shutil.copyfile(made.parent / "ds.json", folder / "ds.json")
    rollback = Rollback(time=1.0, reason="spike", bad_step=3, last_step=3, to_step=2, save_id="a", first_sample=1,
                        consumed_samples=2, abandoned={"global_step9": "b"})
    (run / "rollbacks.jsonl").write_text(json.dumps(asdict(rollback)) + "\n")
    (run / "slurm.jsonl").write_text(json.dumps(asdict(JobStart("1", ["a"], 0, 1.0))) + "\n")
    values = {**flags(corpus, steps=2 * STEPS), "deepspeed_config": folder / "ds.json", "save": run}
    train = json.dumps([f"--{name}={value}" for name, value in values.items()])
    subprocess.run([sys.executable, "-m", "tests.wrong_inputs.stored", str(run), train, str(folder / "out"), *words],
                   cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [tuple(json.loads(line)) for line in (folder / "out").read_text().splitlines()]


def check(found: list[Outcome]) -> None:
    wrong = [each for each in found if each[3] not in ("0", "1", "2", "torch", "global_step2", "global_step3")]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(map(str, wrong[:20]))
    assert {(file, program) for file, _, program, _ in found} == {
        (file, program) for file, programs in READERS.items() for program in programs}
    resumes = {change: outcome for file, change, program, outcome in found if (file, program) == (MANIFEST, "resume")}
    assert resumes.pop("unchanged") == "global_step3"
    assert {*RAW, *KINDS} < resumes.keys()
    assert {change: resumes[change] for change in (*RAW, *KINDS) if resumes[change] != "global_step2"} == {}


def test_damaged_files_of_a_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(outcomes(corpus, tmp_path_factory))


@pytest.mark.slow
def test_every_wrong_value_in_the_files_of_a_run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(outcomes(corpus, tmp_path_factory, "every"))


@pytest.mark.parametrize(("field", "wrong"), [
    ("optimizer", -1), ("optimizer", {"type": 5}), ("initialization", []), ("initialization", {"no_such": 1}),
    ("tokenizer_fingerprint", -1), ("schedule", {"kind": "step", "milestones": None}), ("schedule", {"params": []}),
    ("dropouts", {"vocab_size": 3}), ("lineage", [{"run": "a"}]), ("overrides", [{"step": 1}]),
    ("data", {"sources": 3}), ("world_size", 0), ("global_batch_size", 0), ("step", True), ("step", 2**70),
    ("recipe_states", {"early_stopping": []}), ("recipe_states", {"spikes": {"loss": [None]}}),
    ("files", {"../x": {"bytes": 1, "sha256": ""}}), ("averaged", [None]), ("origin", {"name": "x"})])
def test_manifests_with_wrong_values_and_right_checksums_are_damaged(field: str, wrong: object) -> None:
    values = json.loads(manifest(3).to_json())
    values.pop("sha256")
    assert Manifest.from_json(_with_hash(values)) == manifest(3)
    weights = {**values, "global_batch_size": 0, "weights_only": True}  # as in averages and imports
    assert Manifest.from_json(_with_hash(weights)).weights_only
    with pytest.raises(ValueError, match="|".join((field, "outside"))):
        Manifest.from_json(_with_hash({**values, field: wrong}))
