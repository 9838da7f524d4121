"""`ds-pretrain reproduce` with published tables: computed without training, and wrong rows are rejected in one line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.errors import ConfigError
from pretrain.extensions.recipes import main
from pretrain.extensions.recipes.recipe import find_recipe, read_recipe
from pretrain.extensions.recipes.tables import QUANTITIES, Activations, Formula, Table
from tests.extensions.recipes.test_reproduce import reproduce
from tests.support.launch import ROOT

NAME = "published-tables"


def own_tables(folder: Path, expect: list[dict[str, Any]], **changes: object) -> Path:
    """Copy the recipe, with other expectations."""
    recipe = Path(shutil.copytree(find_recipe(NAME), folder / NAME))
    content = yaml.safe_load((recipe / "recipe.yaml").read_text())
    (recipe / "recipe.yaml").write_text(yaml.safe_dump({**content, "expect": expect, **changes}))
    return recipe


def test_the_published_tables_are_computed_again(tmp_path: Path) -> None:
    """From the command line; with the lines of the recipe's receipt, and with all rows in a file."""
    done = reproduce(tmp_path, NAME)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "runs" / NAME
    recorded = json.loads((find_recipe(NAME) / "receipt.json").read_text())
    assert json.loads((out / "receipt.json").read_text())["results"] == recorded["results"]
    assert "54 of 54 numbers equal as printed" in done.stdout
    assert "verdict: reproduced" in done.stdout
    recipe = yaml.safe_load((find_recipe(NAME) / "recipe.yaml").read_text())
    rows = sum(len(each["rows"]) if "rows" in each else len(each["models"]) * len(each["formulas"])
               for each in recipe["expect"])
    lines = (out / "tables.md").read_text().splitlines()
    assert sum(line.startswith("|") for line in lines) == rows + 2 * len(recipe["expect"])
    assert {each["quantity"] for each in recipe["expect"] if "quantity" in each} == QUANTITIES.keys()
    (out / "receipt.json").write_text("{")
    done = reproduce(tmp_path, str(out), "--out", "again")
    assert done.returncode == 0, done.stderr
    assert "receipt.json is no receipt of a recipe" in done.stdout
    done = reproduce(tmp_path, str(out), "--out", str(out))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "it is the folder of the recipe" in done.stderr


def test_numbers_that_differ_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    table = {"table": "T", "quantity": "states", "columns": ["billions", "ranks", "zero_stage", "published"]}
    recipe = own_tables(tmp_path, [{**table, "rows": [[7, 8, 1, 38.5], [7, 8, 3, 13]]},
                                   {**table, "rows": [[7, 8, 3, 13]], "within": 0.1, "because": "x"}])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reproduce", str(recipe)])
    assert main.main() == 1
    printed = capsys.readouterr().out
    assert "NOT MET  T: 1 of 2 numbers equal as printed" in printed
    assert "ok       T: 1 numbers, the largest deviation is 14 instead of 13 (+7.7%), allowed 10%: x" in printed


@pytest.mark.parametrize(("published", "is_met"), [(38.5, True), (38.4, False), (38, True), (40, False)])
def test_printed_digits_are_rounded_or_truncated(published: float, is_met: bool) -> None:
    row = Table("T", "states", ["billions", "ranks", "zero_stage", "published"], [[7, 8, 1, published]])
    assert row.result({}).is_met is is_met


def test_differences_and_percentages_of_activations_are_compared() -> None:
    models, gelu = {"22B": [48, 6144, 64]}, {"GELU": [0.0, 8.0, 0.0]}
    for formula, is_met in (
            (Formula("divided", [0, 34, 0], gelu, 8), True), (Formula("divided", [0, 34, 0], {}, 8), False),
            (Formula("divided", [0, 34, 0], gelu, 8, percent=[99, 101]), True),
            (Formula("divided", [0, 34, 0], gelu, 8, percent=[0, 50]), False),
            (Formula("recomputed", [0, 2, 0], {}, 8, recompute=True), True)):
        assert Activations("A", models, [formula], 0.01, "").result({}).is_met is is_met, formula


@pytest.mark.parametrize(("changes", "message"), [
    ({"quantity": "flops"}, "the quantity flops is none of parameters, states"),
    ({"columns": ["ranks", "zero_stage", "published"]}, "columns and settings are not billions, ranks, zero_stage"),
    ({"rows": [[7, 8, 1]]}, "a row does not have the 4 cells"), ({"rows": []}, "a row does not have"),
    ({"rows": [[7, 8, 1, "x"]]}, "rows[0][3]")])
def test_a_wrong_table_is_rejected_in_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    table = {"table": "T", "quantity": "states", "columns": ["billions", "ranks", "zero_stage", "published"],
             "rows": [[7, 8, 1, 38.5]]}
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        read_recipe(own_tables(tmp_path, [{**table, **changes}]))
    assert "\n" not in str(error.value)


def test_a_formula_needs_three_coefficients_and_two_bounds() -> None:
    with pytest.raises(ValueError, match="each formula"):
        Activations("A", {"22B": [48, 6144, 64]}, [Formula("x", [34.0])], 0.01, "")
    for wrong in ({"tensor_parallel": 0}, {"percent": [1.0]}):
        with pytest.raises(ValueError, match="at least 1"):
            Formula("x", [0, 34, 0], **wrong)


@pytest.mark.parametrize(("words", "message"), [
    (["--scale", "small"], "--scale small: it has no effect"), (["--corpus", "x"], "--corpus: it has no effect"),
    (["--ranks", "2"], "--ranks"), (["--predict"], "no recipe for GPUs")])
def test_flags_without_an_effect_are_rejected(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch,
                                              tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["reproduce", NAME, *words])
    with pytest.raises(ConfigError, match=message):
        main.main()


def test_runs_need_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs and corpus belong together"):
        read_recipe(own_tables(tmp_path, [], runs=[{"name": "a"}]))


def test_the_page_of_claims_has_the_count_of_published_numbers() -> None:
    recipe, _ = read_recipe(find_recipe("published-tables"))
    count = sum(len(each.lines()) - 2 for each in recipe.expect if isinstance(each, Table | Activations))
    assert f"{count} numbers: [a recipe]" in (ROOT / "pretrain/pages/measurements.md").read_text(encoding="utf-8")
