"""Every key of a DeepSpeed JSON that the rules accept trains, in the values and combinations of a generated table."""

import copy
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pretrain.config.auto_values import set_value
from pretrain.config.ds_json.read import get_value
from tests.support.accepted_keys import (
    MIXTURE,
    MODEL,
    SEQ_LENGTH,
    STEPS,
    Row,
    Schema,
    has_experts,
    reference,
    table,
    values_of,
)
from tests.support.cases import case
from tests.support.launch import run_worker
from tests.support.layouts import relative_difference

IN_DEFAULT_RUN = 6  # rows of the table
# Some engines and process groups are never freed, and each group has threads that poll.
CASES_OF_A_LAUNCH = 32
TOLERANCES = {"fp32": 1e-6, "bf16": 5e-4, "fp16": 2e-4}  # found on 2 and 4 ranks: 9e-8, 2.1e-4, 8e-5
REDUCED_IN = ("communication_data_type", "seq_parallel_communication_data_type")


def _case(name: str, values: dict[str, Any], corpus: str, *, mixture: bool) -> dict[str, Any]:
    model, overrides = MIXTURE if mixture else MODEL
    run_flags = {"model": model, "model_overrides": overrides, "train_data": corpus, "split": "80,20,0",
                 "seq_length": SEQ_LENGTH, "train_steps": STEPS, "eval_steps": 1}
    if "scheduler" not in values:
        run_flags |= {"lr_schedule": "constant", "lr_warmup_steps": 0}
    if get_value(values, "fp16.enabled"):
        run_flags["emulate_fp16"] = True
    return case(name, "two_steps", values, run_flags)


def train(rows: list[Row], schema: Schema, corpus: str, folder: Path) -> dict[str, Any]:
    """Train each row, and each different reference once, on one rank. Returns both by the row's name."""
    plain = Schema(folder, ranks=1)
    references = {row.name: reference(plain, row) for row in rows}
    mixtures = {row.name: has_experts(row.config) for row in rows}
    names: dict[str, str] = {}  # text of each different reference -> its name, that of the first row
    for row in rows:
        names.setdefault(json.dumps([mixtures[row.name], references[row.name]], sort_keys=True), row.name)
    results: dict[str, Any] = {}
    for ranks, cases in (
            (1, [_case(f"{name}-reference", references[name], corpus, mixture=mixtures[name])
                 for name in names.values()]),
            (schema.ranks, [_case(row.name, row.config, corpus, mixture=mixtures[row.name]) for row in rows])):
        for first in range(0, len(cases), CASES_OF_A_LAUNCH):
            results |= run_worker("keys_worker.py", cases[first:first + CASES_OF_A_LAUNCH], ranks,
                                  folder / f"ranks{ranks}_{first}")
    for row in rows:
        text = json.dumps([mixtures[row.name], references[row.name]], sort_keys=True)
        results[f"{row.name}-reference"] = results[f"{names[text]}-reference"]
    return results


def assert_trains(row: Row, results: dict[str, Any]) -> None:
    found, wanted = results[row.name], results[f"{row.name}-reference"]
    dtypes = [found["precision"], *(get_value(row.config, key) or "fp32" for key in REDUCED_IN)]
    tolerance = max(TOLERANCES[dtype] for dtype in dtypes)
    assert all(map(math.isfinite, found["loss"])), found
    assert found["lr"] == pytest.approx(wanted["lr"], rel=1e-6)
    assert found["skipped"][-1] == 0 or found["precision"] == "fp16", "only loss scaling may skip an update"
    applied = 1 if found["skipped"][0] else STEPS  # an overflow of fp16 with a large first scale skips the update
    assert relative_difference(found["loss"][:applied], wanted["loss"][:applied]) < tolerance
    assert found["skipped"][-1] > 0 or all(map(math.isfinite, found["grad_norm"])), found


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Row], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("keys")
    schema = Schema(folder, ranks=2)
    rows = list(islice(table(schema, passes=1), IN_DEFAULT_RUN))
    return rows, train(rows, schema, corpus, folder)


@pytest.mark.parametrize("index", range(IN_DEFAULT_RUN))
def test_rows_with_most_keys_of_the_schema_train(index: int, results: tuple[list[Row], dict[str, Any]]) -> None:
    assert_trains(results[0][index], results[1])


def test_other_keys_are_rejected_or_change_nothing(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """The keys that the schema marks as without effect, or as rejected, with their neutral values."""
    schema = Schema(tmp_path, ranks=2)
    plain = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
             "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    for dotted, key in schema.keys_without_effect:
        for value in [*values_of(dotted, key, schema.own), {"enabled": True, "x": 3}]:
            with subtests.test(f"{dotted}: {value}"):
                without, values = copy.deepcopy(plain), copy.deepcopy(plain)
                if "." in dotted and get_value(plain, dotted.rpartition(".")[0]) is None:
                    set_value(without, dotted.rpartition(".")[0], {})
                set_value(values, dotted, value)
                assert schema.accepted(values) in ("", schema.accepted(without))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_accepted_key_trains(ranks: int, corpus: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    schema = Schema(tmp_path, ranks=ranks)
    rows = list(table(schema, passes=1))
    in_table = {dotted.rpartition(":")[2] for row in rows for dotted, _ in row.items}
    assert {dotted for dotted, _ in schema.keys} <= in_table, "no row accepts these keys"
    results = train(rows, schema, corpus, tmp_path)
    for row in rows:
        with subtests.test(row.name):
            assert_trains(row, results)
