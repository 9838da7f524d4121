"""Runs of train.py that start from weights: --init_from, and a run folder of imported weights."""

import json
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from pretrain.checkpoint.format.run_checkpoints import newest_good
from pretrain.checkpoint.load.init_from import check_origin
from pretrain.checkpoint.load.start import Start, check_start
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_start, read_rows
from tests.distributed.checkpoint.test_init_from import loss_of_transformers, write_model
from tests.support.cases import config, flags
from tests.support.conversion_faults import run_tool
from tests.support.hub_server import write_cache
from tests.support.launch import train_ranks
from tests.support.layouts import dp2, pp2, relative_difference
from tests.support.run_rows import losses


@pytest.fixture(scope="module")
def folder(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in a cache of the Hub, the same model imported, and two runs of each."""
    base = tmp_path_factory.mktemp("start")
    model = write_model("llama", base / "model")
    write_cache(base, "org/llama", model)
    done = run_tool("import", model, "--output", base / "imported")
    assert done.returncode == 0, done.stderr
    return base


def words(folder: Path, corpus: str, save: str, layout: dict[str, Any], **others: Any) -> list[str]:
    """Return the flags of a run. The model is the weights'."""
    (folder / f"{save}.json").write_text(json.dumps(layout))
    values = {name: value for name, value in flags(corpus, steps=4).items() if not name.startswith("model")}
    values |= {"deepspeed_config": f"{folder / save}.json", "save": str(folder / save), "log_interval": 1, **others}
    return [f"--{name}={value}" for name, value in values.items()]


def run(ranks: int, flags: list[str], folder: Path, *, code: int = 0) -> str:
    done: list[subprocess.CompletedProcess[str]] = train_ranks(ranks, flags, folder)
    output = "\n".join(process.stdout for process in done)
    assert [process.returncode for process in done] == [code] * ranks, output[-5000:]
    return output


def start(flags: list[str]) -> Start:
    return check_start(parse_arguments(flags), world_size=2, device=cpu_device())


def test_a_run_from_other_weights_resumes_without_them(folder: Path, corpus: str) -> None:
    source = folder / "models--org--llama"
    flags = words(folder, corpus, "run", dp2(3), init_from=source)
    output = run(2, [*flags, "--exit_step=2"], folder)
    assert f"starts from the weights in {source}/snapshots/" in output
    assert relative_difference([losses(folder / "run")[1]],
                               [loss_of_transformers(folder / "model", corpus)]) <= 1e-5
    origin = newest_start(folder / "run")["origin"]
    assert origin["name"] == str(source)
    assert [row["fingerprint"] for row in read_rows(folder / "run" / "events.jsonl") if row["event"] == "init"] == [
        origin["fingerprint"]]
    source.rename(folder / "models--org--moved")
    output = run(2, flags, folder)
    assert "resumed from" in output
    assert "starts from" not in output
    assert sorted(losses(folder / "run")) == [1, 2, 3, 4]
    newest = newest_good(folder / "run" / "checkpoints")
    assert newest is not None
    assert newest[1].origin == origin
    # the checkpoint of a run is a source as well, and the same weights at another path are the same source
    assert start([*flags[:-1], f"--init_from={folder / 'models--org--moved'}"]).resume is not None
    shutil.copytree(folder / "model", folder / "other")
    (folder / "other" / "config.json").write_text((folder / "model" / "config.json").read_text() + " ")
    with pytest.raises(ConfigError, match=r"--init_from .*other: the run resumes from .*global_step4, and it started"):
        start([*flags[:-1], f"--init_from={folder / 'other'}"])


def test_the_name_of_a_repository_stays_the_source_after_the_cache_is_gone(
        folder: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = write_cache(folder / "hub", "org/llama", folder / "model")
    flags = words(folder, corpus, "named", dp2(2), init_from="org/llama")
    origin = start(flags).plan.origin
    assert origin is not None
    assert (origin.name, Path(origin.folder).parents[1]) == ("org/llama", cache)
    step4 = newest_good(folder / "run" / "checkpoints")
    assert step4 is not None
    shutil.rmtree(cache)
    check_origin("org/llama", step4[0], replace(step4[1], origin=asdict(origin)))
    with pytest.raises(ConfigError, match="started from org/llama"):
        check_origin("org/other", step4[0], replace(step4[1], origin=asdict(origin)))


def test_a_run_begins_with_imported_weights_in_its_folder(folder: Path, corpus: str) -> None:
    flags = words(folder, corpus, "imported", pp2(1))
    checkpoint = folder / "imported" / "checkpoints" / "global_step0"
    with pytest.raises(ConfigError, match=r"--resume required: .*global_step0 holds weights alone"):
        start([*flags, "--resume=required"])
    with pytest.raises(ConfigError, match="already holds weights to start from"):
        start([*flags, f"--init_from={folder / 'model'}"])
    with pytest.raises(ConfigError, match=r"--model_overrides: num_hidden_layers: found 2; expected 3, as in the"):
        start([*flags, "--model_overrides=num_hidden_layers=2"])
    output = run(2, [*flags, "--exit_step=3", "--save_interval=1", "--keep_checkpoints=2"], folder)
    assert f"starts from the weights in {folder / 'model'}" in output
    first = relative_difference([losses(folder / "imported")[1]], [loss_of_transformers(folder / "model", corpus)])
    assert first <= 1e-5
    resumed = start(flags).resume
    assert resumed is not None
    assert resumed.manifest.step == 3
    assert resumed.manifest.origin is not None
    assert resumed.manifest.origin["name"] == str(folder / "model")
    # a run is a source, too: its newest checkpoint, or the one that is named
    assert sorted(path.name for path in checkpoint.parent.glob("global_step*")) == [
        "global_step0", "global_step2", "global_step3"]  # imported weights are never removed
    for source, step in ((folder / "imported", 3), (checkpoint, 0)):
        weights = start(words(folder, corpus, f"from{step}", dp2(2), init_from=source)).weights
        assert weights is not None
        assert weights.origin.folder == str(checkpoint.with_name(f"global_step{step}"))
    next(checkpoint.with_name("global_step3").glob("*.pt")).unlink()
    plan = start(words(folder, corpus, "from2", dp2(2), init_from=folder / "imported")).plan
    assert plan.origin is not None
    assert plan.origin.folder == str(checkpoint.with_name("global_step2"))
    assert [note for note in plan.notes if note.startswith("not used for --init_from: ") and "global_step3" in note]


def test_damaged_weights_are_rejected_before_the_engine_is_built(folder: Path, corpus: str) -> None:
    copy = folder / "damaged" / "models--org--llama"
    shutil.copytree(folder / "model", folder / "copied")
    write_cache(copy.parent, "org/llama", folder / "copied")
    blob = max((copy / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    output = run(1, words(folder, corpus, "none", config(2, micro=8), init_from=copy), folder, code=2)
    assert "a file is damaged" in output
    assert "SHA-256" in output
    assert [path.name for path in (folder / "none").iterdir()] == [".run.lock"]  # the lock, which has been released
