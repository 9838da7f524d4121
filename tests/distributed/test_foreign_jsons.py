"""DeepSpeed JSONs of other projects train unchanged. The JSONs were collected after the validation was written."""

import re
from typing import Any

import pytest

from tests.support.cases import case, flags
from tests.support.foreign_jsons import read_foreign_jsons
from tests.support.launch import run_cases

SOURCES = (
    "OpenGVLab/InternVL/internvl_chat/zero_stage1_config.json",
    "tatsu-lab/stanford_alpaca/configs/default_offload_opt_param.json",
    "bigscience-workshop/bigscience/jz/configs/deepspeed/ds_zero2.json",
    "shibing624/MedicalGPT/scripts/zero1.json",
    "modelscope/ms-swift/swift/llm/ds_config/zero3.json",
    "SulRash/minLLMTrain/configs/ds_config.json",
)


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    foreign = {row.source: row for row in read_foreign_jsons()}
    cases = []
    for source in SOURCES:
        row = foreign[source]
        fp16 = row.config.get("fp16", {}).get("enabled") is True
        run_flags = {**flags(corpus, layers=2, steps=2, emulate_fp16=fp16), **row.flags}
        cases.append(case(re.sub(r"\W", "_", source), "two_steps", row.config, run_flags))
    return run_cases(cases, 2, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("source", SOURCES)
def test_trains_two_steps(source: str, results: dict[str, dict[str, Any]]) -> None:
    row = results[re.sub(r"\W", "_", source)]
    assert len(row["loss"]) == 2
    assert all(abs(loss - row["before"]) < 0.1 * row["before"] for loss in row["loss"]), row["loss"]
    assert row["skipped"][-1] == 0 or row["precision"] == "fp16"  # an initial loss scale of 2**32 overflows
    config = {foreign.source: foreign for foreign in read_foreign_jsons()}[source].config
    assert row["stage"] == config["zero_optimization"]["stage"]
