"""Partition methods of pipelines on real engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import case, config, flags
from tests.support.launch import run_worker, train_ranks

STEPS = 4
UNTIED = "tie_word_embeddings=false"
LAYERS = 4  # blocks; after the token and position embeddings, before the final norm and the head


def json_of(method: str, *, stages: int = 2, **others: Any) -> dict[str, Any]:
    values = config(1, stages=stages, accumulation=4)
    values["pipeline"]["partition_method"] = method
    return {**values, **others}


def slow_block(index: int) -> list[int]:
    """Return times in which one block is as slow as all other layers together."""
    times = [1, 1, *[100] * LAYERS, 1, 100]
    times[2 + index] = 500
    return times


def cases(corpus: str) -> dict[int, list[dict[str, Any]]]:
    tied, untied = flags(corpus, steps=STEPS), flags(corpus, steps=STEPS, overrides=UNTIED)
    two = [case(name, "run", json_of(name), tied)
           for name in ("flops", "parameters", "uniform", "time", "type:(?:Block|FinalNorm)", "type:^token|block")]
    two += [case(f"untied_{name}", "run", json_of(name), untied) for name in ("flops", "time", "type:block|losshead")]
    two += [case("recorded", "run", json_of("time"), tied, recorded={"nanoseconds": slow_block(0)}),
            case("other_conditions", "run", json_of("time"), tied,
                 recorded={"nanoseconds": slow_block(0), "conditions": {}}),
            case("damaged", "run", json_of("time"), tied, recorded={"nanoseconds": [1, 2]})]
    four = [case("flops", "run", json_of("flops", stages=4), tied),
            case("time", "run", json_of("time", stages=4), tied),
            case("recorded", "run", json_of("time", stages=4), tied, recorded={"nanoseconds": slow_block(3)}),
            case("tensor", "run", json_of("time", tensor_parallel={"autotp_size": 2}), tied)]
    return {2: two, 4: four}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pipelines")
    found = {}
    for ranks, own in cases(corpus).items():
        rows = run_worker("pipeline_worker.py", own, ranks, folder / str(ranks))
        found |= {f"{name}@{ranks}": row for name, row in rows.items()}
    return found


def test_losses_do_not_depend_on_the_partition(results: dict[str, dict[str, Any]], subtests: pytest.Subtests) -> None:
    for name, row in results.items():
        reference = results["untied_flops@2" if name.startswith("untied") else "flops@2"]
        with subtests.test(name):
            for key in ("loss", "grad_norm"):
                assert row[key] == pytest.approx(reference[key], rel=1e-6 if key == "loss" else 1e-5), key


def test_engine_and_estimate_have_the_same_stages(results: dict[str, dict[str, Any]],
                                                  subtests: pytest.Subtests) -> None:
    for name, row in results.items():
        with subtests.test(name):
            assert row["parts"] == row["estimated"]
            assert row["same_size"]  # of the parameters of rank 0


def test_stages_of_each_method(results: dict[str, dict[str, Any]]) -> None:
    parts = {name: row["parts"] for name, row in results.items()}
    assert parts["uniform@2"] == [0, 4, 8]
    assert parts["type:(?:Block|FinalNorm)@2"][1] in (4, 5)
    # a tied head is a second TokenEmbedding: six layers match
    assert parts["type:^token|block@2"] == [0, 4, 8]
    assert parts["untied_type:block|losshead@2"][1] in (4, 5)


def test_measured_times(results: dict[str, dict[str, Any]]) -> None:
    for name in ("time@2", "untied_time@2", "time@4", "tensor@4"):
        times = results[name]["times"]
        assert len(times) == LAYERS + 4
        assert min(times) > 0
        assert len({*times[2:-2]}) == 1, "equal blocks are measured once"
        assert times[2] > times[-2], "a block takes longer than a norm"


def test_a_resume_uses_the_recorded_times(results: dict[str, dict[str, Any]]) -> None:
    """The slow block gets a stage of its own. Times of other conditions, or of another model, are measured again."""
    assert results["recorded@2"]["times"] == slow_block(0)
    assert results["recorded@2"]["parts"] == [0, 3, 8]
    assert results["recorded@4"]["times"] == slow_block(3)
    for name in ("other_conditions@2", "damaged@2"):
        assert len(results[name]["times"]) == LAYERS + 4
        assert results[name]["times"] != slow_block(0)


def test_a_run_records_times_and_resumes(tmp_path: Path, corpus: str) -> None:
    """Then the times in run.json are changed: the resumed run has the stages that they give."""
    (tmp_path / "ds.json").write_text(json.dumps(json_of("time")))
    run = tmp_path / "run"
    values = {**flags(corpus, steps=6), "deepspeed_config": tmp_path / "ds.json", "save": run, "log_interval": 1,
              "eval_interval": 0}
    words = [f"--{name}={value}" for name, value in values.items()]
    first = train_ranks(2, [*words, "--exit_step=4"], tmp_path)
    assert [rank.returncode for rank in first] == [0, 0], first[0].stdout
    starts = json.loads((run / "run.json").read_text())
    assert len(starts[-1]["layer_times"]["nanoseconds"]) == LAYERS + 4
    starts[-1]["layer_times"]["nanoseconds"] = slow_block(0)
    (run / "run.json").write_text(json.dumps(starts))
    second = train_ranks(2, words, tmp_path)
    assert [rank.returncode for rank in second] == [0, 0], second[0].stdout
    assert "layers 0 to 2 0.000502 ms, layers 3 to 7 0.000401 ms" in second[0].stdout
    assert json.loads((run / "run.json").read_text())[-1]["layer_times"]["nanoseconds"] == slow_block(0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
