"""--override on real engines: the steps after the resume equal an engine's whose settings were set by hand."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, DROPOUT, NO_NVME, case, config, flags, nvme
from tests.support.launch import run_worker

NAMES = "lr,schedule,weight_decay,betas,eps"
PARAMS = {"lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}


def _changed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON with the new settings of the optimizer."""
    return {**values, "optimizer": {**values["optimizer"], "params": PARAMS}}


def _case(name: str, values: dict[str, Any], run_flags: dict[str, Any], target: dict[str, Any] | None = None,
          ) -> dict[str, Any]:
    new_flags = {**run_flags, "override": NAMES} | ({} if "scheduler" in values else {"lr_schedule": "linear"})
    return case(name, "override", values, run_flags, new_config=_changed(target or values), new_flags=new_flags)


def _cases(corpus: str, swap: Path, slow: bool) -> list[dict[str, Any]]:
    small = flags(corpus, overrides=DROPOUT, steps=5, lr_warmup_steps=1)
    plain = flags(corpus, steps=5, lr_warmup_steps=1)
    wide = flags(corpus, steps=5, hidden=256, lr_warmup_steps=1)  # only sub-groups of more than 1 MiB are swapped
    from_json = flags(corpus, steps=5, lr_warmup_steps=3)
    auto = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    if slow:
        layouts = {"zero1": config(1, precision="bf16"), "zero2": config(2, precision="bf16"),
                   "zero3": config(3, precision="bf16"),
                   "zero2_cpu": config(2, precision="bf16", offload_optimizer=CPU),
                   "pipeline2_zero0": config(0, precision="bf16", stages=2)}
        cases = [_case(name, values, small) for name, values in layouts.items()]
        cases.append(_case("no_weight_decay", config(2), {**small, "no_weight_decay": ["embeddings"]}))
        return [*cases, _case("fp16_zero2", config(2, precision="fp16"), {**small, "emulate_fp16": True})]
    layouts = {"fp32_zero0": config(0),
               "zero3_cpu": config(3, precision="bf16", offload_optimizer=CPU, offload_param=CPU),
               "pipeline2_zero1": config(1, stages=2)}
    cases = [_case(name, values, small) for name, values in layouts.items()]
    cases.append(_case("mup", config(1, precision="bf16"), {
        **small, "mup_base_width": 32, "model_overrides": f"{small['model_overrides']},tie_word_embeddings=false"}))
    cases.append(_case("json_scheduler", {**config(2, precision="bf16"), "scheduler": auto}, from_json))
    cases.append(_case("other_layout", config(2), plain, config(3)))
    if not NO_NVME:
        cases.append(_case("nvme", config(3, precision="bf16", offload_optimizer=nvme(swap)), wide))
    return cases


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "more"])
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory,
            request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("overrides")
    (folder / "swap").mkdir()
    return run_worker("override_worker.py", _cases(corpus, folder / "swap", request.param), 2, folder)


def test_overridden_settings_act_on_every_engine(results: dict[str, dict[str, Any]],
                                                 subtests: pytest.Subtests) -> None:
    assert len(results) >= 6
    for name, result in results.items():
        with subtests.test(name):
            expected = result["expected"]
            for found in result["found"]:  # the second one: after another load, as in a rollback
                if name == "other_layout":
                    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
                    assert found["lr"] == expected["lr"]
                else:
                    assert found == expected
            if name != "other_layout":
                assert len(set(result["states"])) == 1, "weights or optimizer states differ at the end"
            assert expected["lr"][0] > result["before"]["lr"][-1], "the rate was not raised"
            assert result["dropout_follows_seed"]
            names = [each["name"] for each in result["overrides"]]
            assert sorted(names) == sorted({*NAMES.split(",")} - ({"schedule"} if name == "json_scheduler" else set()))
            assert all(each["step"] == 2 for each in result["overrides"])
            decay = next(each for each in result["overrides"] if each["name"] == "weight_decay")
            assert (decay["from"], decay["to"]) == (0.1, 0.3)
            assert sum("--override" in note for note in result["notes"]) == 5
