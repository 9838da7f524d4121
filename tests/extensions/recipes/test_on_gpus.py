"""`ds-pretrain reproduce` with recipes for GPUs: valid on their GPUs, predicted as the page says, rejected here."""

import json
import os
from pathlib import Path

import pytest
import yaml

from pretrain.commands import check
from pretrain.errors import ConfigError
from pretrain.extensions.recipes import main
from pretrain.extensions.recipes.describe import plan_of, predict
from pretrain.extensions.recipes.recipe import find_recipe, read_dataset, read_recipe, recipe_names
from tests.extensions.recipes.test_reproduce import TEXT, own_recipe, reproduce
from tests.support.launch import ROOT
from tests.support.sparse_data import write_sparse_data

GPU_RECIPES = [name for name in recipe_names() if read_recipe(find_recipe(name))[0].on_gpus]


def fake_gpus(folder: Path, number: int, mebibytes: int = 81_559) -> str:
    """Write a nvidia-smi that reports these GPUs. Returns the PATH with it."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    program = folder / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\n" + f"echo {mebibytes}\n" * number)
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_recipe_for_gpus_passes_check_and_fits_and_has_the_published_sizes(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find_recipe(name)
    recipe, _ = read_recipe(folder)
    gpus, (run,) = recipe.on_gpus, recipe.scales["full"].starts()
    assert gpus is not None
    plan = plan_of(folder, run, gpus.gpu)
    assert predict(plan, gpus.gpu).recommendable
    assert plan.length.tokens_after(plan.train_steps) == pytest.approx(gpus.tokens, rel=0.01)
    assert gpus.parameters is None or plan.model.num_parameters() == pytest.approx(gpus.parameters, rel=0.01)
    dataset = read_dataset(folder, gpus)
    prepares = [words for line in dataset.prepare if "prepare" in (words := line.split())]
    assert {words[words.index("--tokenizer") + 1] for words in prepares} <= {plan.args.tokenizer}
    # the command `check`, with data of zeros, and without the tokenizer, which would be downloaded
    monkeypatch.chdir(tmp_path)
    lines = (folder / "run.yaml").read_text().splitlines()
    (tmp_path / "run.yaml").write_text("\n".join(line for line in lines if not line.startswith("tokenizer")))
    (tmp_path / "data").mkdir()
    for prefix in plan.data.prefixes:
        write_sparse_data(Path(prefix), num_documents=20_000, full_documents=20_000, length=plan.args.seq_length)
    check.main(["--world_size", str(run.ranks), "--gpu", gpus.gpu, *run.words({})[2:], "--valid_data",
                plan.data.train[0]])
    printed = capsys.readouterr().out
    assert f"= {run.ranks} ranks" in printed
    assert "predicted" in printed
    assert "THE RUN DOES NOT FIT" not in printed


def test_the_page_has_the_predicted_table() -> None:
    page = (ROOT / "pretrain/extensions/recipes/README.md").read_text(encoding="utf-8")
    done = reproduce(ROOT, "--predict")
    assert len(done.stdout.splitlines()) == 2 + len(GPU_RECIPES)
    assert done.stdout in page


def test_what_the_full_scale_on_gpus_lacks_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 0))
    missing = {"this machine has no GPUs": [], "it needs 1 GPU with": ["--ranks", "1"]}
    for message, words in missing.items():
        done = reproduce(tmp_path, "gpt2-fineweb", *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr
    assert not (tmp_path / "runs/gpt2-fineweb/receipt.json").exists()  # that of the recipe is of another machine
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 8, 8_000))
    assert "those of this machine have 7.8 GiB" in reproduce(tmp_path, "gpt2-fineweb").stderr
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 8))
    done = reproduce(tmp_path, "gpt2-fineweb")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "hf download HuggingFaceFW/fineweb" in done.stderr
    assert "ds-pretrain prepare fineweb/sample/10BT --tokenizer gpt2 --out data/train" in done.stderr
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 32))
    (tmp_path / "runs/pythia-160m/data").mkdir(parents=True)
    write_sparse_data(tmp_path / "runs/pythia-160m/data/train", num_documents=4, full_documents=4, length=9)
    assert "the published data has 0cd548ef" in reproduce(tmp_path, "pythia-160m").stderr


@pytest.mark.parametrize("words", [["wsd", "--predict"], ["wsd", "--ranks", "2"], ["gpt2-fineweb", "--corpus", "x"],
                                   ["gpt2-fineweb", "--ranks", "3"],
                                   ["gpt2-fineweb", "--scale", "small", "--ranks", "2"]])
def test_flags_without_an_effect_are_rejected_in_one_line(words: list[str], monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reproduce", *words])
    with pytest.raises(ConfigError, match=r"no effect|no recipe for GPUs|--scale small|train_batch_size"):
        main.main()


def test_the_full_scale_on_gpus_continues_with_prepared_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """GPUs are pretended; instead of the commands that need them, the end of a run is written."""
    commands = list[tuple[str, ...]]()

    def record(out: Path, *words: str, **_: bool) -> None:
        commands.append(words)
        if words[0] != "check":
            (out / "runs/train").mkdir(parents=True)
            rows = [{"step": 19560, "loss": 3.3, "consumed_tokens": 19560 * 2**19, "step_time_ms": 140.0},
                    {"step": 19560, "eval_loss": 3.27, "split": "valid"}]
            (out / "runs/train/metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 4))
    monkeypatch.setattr("sys.argv", ["reproduce", "gpt2-fineweb", "--ranks", "4"])
    monkeypatch.setattr("pretrain.commands.small_runs.run_subcommand", record)
    (tmp_path / "runs/gpt2-fineweb/data").mkdir(parents=True)
    write_sparse_data(tmp_path / "runs/gpt2-fineweb/data/train", num_documents=4, full_documents=4, length=9)
    assert main.main() == 0
    flags = ("--config", "run.yaml", "--save", "runs/train")
    assert commands == [("check", "--world_size", "4", *flags), ("--num_accelerators", "4", *flags)]
    assert "verdict: reproduced" in capsys.readouterr().out
    # a finished run, as of several hosts, needs no GPUs, and is not checked again
    monkeypatch.setenv("PATH", fake_gpus(tmp_path, 0))
    assert main.main() == 0
    assert len(commands) == 2


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "gpt2-fineweb" else pytest.mark.slow)
                                  for name in GPU_RECIPES])
def test_the_small_scale_of_a_recipe_for_gpus_runs_with_its_files(name: str, tmp_path: Path) -> None:
    """The text is another one than the recipe's; the losses of the recipe's own are in its receipt."""
    recipe = own_recipe(tmp_path, "http://127.0.0.1:9/input.txt", name)
    values = yaml.safe_load((recipe / "recipe.yaml").read_text())
    values["small"]["expect"] = [{"run": "train", "between": [3.0, 5.6]}]  # below ln 258, the loss at the start
    (recipe / "recipe.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    done = reproduce(tmp_path, str(recipe), "--scale", "small", "--corpus", "text")
    assert done.returncode == 0, done.stdout + done.stderr
