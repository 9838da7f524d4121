"""`ds-pretrain reproduce`: recipes are valid, run from download to result, and wrong ones are rejected in one line."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from pretrain.commands.small_runs import Curve
from pretrain.errors import ConfigError
from pretrain.extensions.recipes.describe import description
from pretrain.extensions.recipes.recipe import Grid, find_recipe, read_recipe, recipe_names
from pretrain.extensions.recipes.results import (
    Between,
    CriticalBatch,
    Lower,
    OneCurve,
    Optimum,
    fit_critical_batch,
    save_plot,
)
from pretrain.stored_json import read_object
from tests.support.launch import ROOT

TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "pretrain/model").rglob("*.py")))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Serve input.txt over HTTP."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served/input.txt").write_text(TEXT, encoding="utf-8")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/input.txt"
        server.shutdown()


def own_recipe(folder: Path, url: str, name: str = "layouts") -> Path:
    """Copy a recipe with another corpus. The property of the recipe `layouts` holds for every text."""
    recipe = Path(shutil.copytree(find_recipe(name), folder / "recipes" / name))
    for path in find_recipe(name).parent.glob("*.yaml"):
        shutil.copy(path, recipe.parent)
    corpus = yaml.safe_load((find_recipe(name).parent / "tinyshakespeare.yaml").read_text())
    corpus |= {"url": url, "sha256": hashlib.sha256(TEXT.encode()).hexdigest()}
    (recipe.parent / "tinyshakespeare.yaml").write_text(yaml.safe_dump(corpus))
    return recipe


def reproduce(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pretrain", "reproduce", *words], cwd=folder, capture_output=True,
                          text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_recipe_runs_from_download_to_verdict(url: str, tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, url)
    done = reproduce(tmp_path, str(recipe), "--scale", "small")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "runs/layouts-small"
    receipt = read_object(out / "receipt.json")
    assert receipt["results"][0]["met"]
    assert receipt["runs"]["resumed"]["loss"].keys() == receipt["runs"]["zero0"]["loss"].keys()
    assert receipt["sha256"]["train.txt"] == hashlib.sha256((out / "train.txt").read_bytes()).hexdigest()
    assert (out / "train.txt").read_text() + (out / "valid.txt").read_text() == TEXT
    assert (out / "verdict.svg").read_text().startswith("<?xml")
    # an expectation that is not met, with the finished runs
    wrong = yaml.safe_load((recipe / "recipe.yaml").read_text())
    wrong["small"]["expect"] = [{"run": "zero0", "between": [0.0, 0.1], "published": 0.05}]
    (recipe / "recipe.yaml").write_text(yaml.safe_dump(wrong))
    again = reproduce(tmp_path, str(recipe), "--scale", "small")
    assert again.returncode == 1
    assert "NOT MET  zero0: validation loss" in again.stdout
    assert "starting DeepSpeed's launcher" not in again.stderr


@pytest.mark.parametrize(("change", "message"), [
    ({"titel": "x"}, "titel"), ({"runs": [{"name": "a", "flags": {"train_stepz": 3}}]}, '"train_steps"'),
    ({"expect": [{"run": "zero9", "between": [0, 1]}]}, "zero9"), ({"corpus": "nothing.yaml"}, "nothing.yaml")])
def test_a_wrong_recipe_is_rejected_in_one_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, "http://127.0.0.1:9/input.txt")
    path = recipe / "recipe.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    done = reproduce(tmp_path, str(recipe))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr


def test_a_wrong_corpus_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("other")
    recipe = own_recipe(tmp_path, "http://127.0.0.1:9/input.txt")
    for words, message in ((["--corpus", "other.txt"], "its SHA-256 is"), (["--corpus", "none.txt"], "cannot be read"),
                           ([], "Give --corpus FILE")):
        done = reproduce(tmp_path, str(recipe), *words)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
    done = reproduce(tmp_path, "layout")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert 'Did you mean "layouts"' in done.stderr


def test_expectations() -> None:
    curves = {"a": Curve({1: 3.0, 2: 2.0}, {2: 2.1}), "b": Curve({1: 3.0, 2: 2.2}, {2: 2.0}), "c": Curve({1: 3.0}, {})}
    for expectation, is_met in (
            (Between("a", [2.0, 2.2]), True), (Between("a", [2.2, 2.3]), False), (Between("c", [0, 9]), False),
            (OneCurve(["a", "b"], 0.3), True), (OneCurve(["a", "b"], 0.1), False), (OneCurve(["a", "c"], 9), False),
            (Lower("b", "a"), True), (Lower("a", "b"), False), (Lower("a", "b", by=-0.2), True),
            (Lower("b", "a", by=0.2), False), (Lower("c", "a"), False)):
        assert expectation.result(curves).is_met is is_met, expectation


def test_a_grid_is_every_combination_of_its_tables() -> None:
    grid = Grid([{"w64": {"model": "a.json"}, "w128": {"model": "b.json"}}, {"0.5": {"learning_rate": 0.5}, "1": {}}])
    assert [(run.name, run.flags) for run in grid.runs()] == [
        ("w64-0.5", {"model": "a.json", "learning_rate": 0.5}), ("w64-1", {"model": "a.json"}),
        ("w128-0.5", {"model": "b.json", "learning_rate": 0.5}), ("w128-1", {"model": "b.json"})]


def test_the_optimum_of_a_sweep(tmp_path: Path) -> None:
    optima = {"a": 4, "b": 8, "c": 16, "end": 32}
    curves = {f"{name}-{rate}": Curve({1: 3.0}, {1: abs(math.log2(rate / best))})
              for name, best in optima.items() for rate in (1, 2, 4, 8, 16, 32)}
    for expectation, is_met in (
            (Optimum(["a", "b"], within=2), True), (Optimum(["a", "c"], within=2), False),
            (Optimum(["a", "b", "c"], moves_by=4), True), (Optimum(["a", "b"], moves_by=4), False),
            (Optimum(["a", "end"], within=99), False), (Optimum(["a", "none"], within=99), False)):
        assert expectation.result(curves).is_met is is_met, expectation
    assert "4 (a), 8 (b)" in Optimum(["a", "b"], within=2).result(curves).text
    assert save_plot(tmp_path / "verdict.svg", "", curves, [Optimum(["a", "b"]), Optimum(["a", "c"])])


@pytest.mark.parametrize("critical", [10.0, 100.0])
def test_the_critical_batch_size_is_that_of_the_steps_to_the_loss(critical: float, tmp_path: Path) -> None:
    """The loss falls by 1 in Smin (1 + critical / B) steps; another learning rate needs twice as many."""
    curves = {}
    for batch in (4, 16, 64, 256):
        steps = 40 * (1 + critical / batch)
        for sweep, slower in (("good", 1), ("bad", 2)):
            losses = {step: 5 - step / steps / slower for step in range(5, round(3 * steps), 5)}
            curves[f"{sweep}-{batch}"] = Curve(losses, losses, noise_scale={1: 9e9, round(steps): 1.5 * critical})
    fewest_steps, found = fit_critical_batch({b: 40 * (1 + critical / b) for b in (4, 16, 64, 256)})
    assert (fewest_steps, found) == pytest.approx((40, critical), rel=0.01)
    expected = CriticalBatch(["bad", "good"], 4.0, "good-64", within=2)
    assert expected.result(curves).is_met, expected.result(curves).text
    assert f"measured noise scale {1.5 * critical:.3g} samples" in expected.result(curves).text
    assert not replace(expected, within=1.2).result(curves).is_met
    assert not replace(expected, loss=1.0).result(curves).is_met
    assert save_plot(tmp_path / "verdict.svg", "", curves, [expected])


def test_a_published_curve_is_drawn_up_to_the_end_of_the_run(tmp_path: Path) -> None:
    curve = Curve({10: 3.0, 20: 2.0}, {20: 2.1}, {10: 1000, 20: 2000})
    by_step = Between("a", [2.0, 2.2], {10: 3.1, 20: 2.15, 40: 1.9})
    by_tokens = Between("a", [2.0, 2.2], {1000: 3.1, 2000: 2.15, 4000: 1.9}, by_tokens=True)
    assert by_step.published_points(curve) == by_tokens.published_points(curve) == [(10, 3.1), (20, 2.15)]
    assert by_step.result({"a": curve}).text.endswith("published: 1.9 at step 40")
    assert by_tokens.result({"a": curve}).text.endswith("published: 1.9 at 4e+03 tokens")
    assert save_plot(tmp_path / "verdict.svg", "", {"a": curve}, [by_tokens])
    assert "published" in (tmp_path / "verdict.svg").read_text()


@pytest.mark.parametrize("name", recipe_names())
def test_each_recipe_has_a_page_and_a_receipt_of_met_expectations(name: str) -> None:
    folder = find_recipe(name)
    recipe, corpus = read_recipe(folder)
    assert corpus is None or len(corpus.sha256) == 64
    receipt = json.loads((folder / "receipt.json").read_text())
    assert all(result["met"] for result in receipt["results"])
    assert receipt["scale"] == ("small" if recipe.on_gpus else "full")
    assert receipt["runs"].keys() == set(recipe.scales[receipt["scale"]].names())
    if recipe.on_gpus:
        return  # they share a page: test_on_gpus.py
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"ds-pretrain reproduce {name}" in page
    assert recipe.source.partition(" ")[0] in page


@pytest.mark.parametrize("name", ["mixture", *(pytest.param(name, marks=pytest.mark.slow)
                                               for name in ("mup", "critical-batch"))])
def test_the_small_scale_of_a_recipe_runs_with_its_files(name: str, tmp_path: Path) -> None:
    """The text is another one than the recipe's."""
    recipe = own_recipe(tmp_path, "http://127.0.0.1:9/input.txt", name)
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    done = reproduce(tmp_path, str(recipe), "--scale", "small", "--corpus", "text")
    assert done.returncode == 0, done.stdout + done.stderr
    receipt = read_object(tmp_path / f"runs/{name}-small/receipt.json")
    assert receipt["runs"].keys() == set(read_recipe(recipe)[0].scales["small"].names())


@pytest.mark.parametrize("name", recipe_names())
def test_the_description_of_a_recipe_has_its_sources_and_results(name: str) -> None:
    folder = find_recipe(name)
    (recipe, corpus), receipt = read_recipe(folder), read_object(folder / "receipt.json")
    page = "\n".join(description(name))
    trained = () if corpus is None else (corpus.url, corpus.sha256, *receipt["sha256"].values(), "FLOPs a token",
                                         f"ds-pretrain reproduce {name} --scale small")
    for text in (f"# {recipe.title}", recipe.source, recipe.time, receipt["machine"], f"ds-pretrain reproduce {name}",
                 *(result["text"] for result in receipt["results"]), *trained):
        assert text in page, text
    assert ("| GPU-hours |" in page) is ("## Expected" in page) is (recipe.on_gpus is not None)


def test_the_description_of_a_recipe_without_or_with_a_wrong_receipt(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, "http://127.0.0.1:9/input.txt")
    (recipe / "receipt.json").write_text('{"runs": {}}')
    with pytest.raises(ConfigError, match="no receipt of a recipe"):
        description(str(recipe))
    (recipe / "receipt.json").unlink()
    assert "## Measured" not in description(str(recipe))
    done = reproduce(tmp_path, "--describe")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs the NAME of a recipe" in done.stderr
