"""The same model, data and global batch give the same losses in every layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import CPU, NO_NVME, case, config, flags, nvme, nvme_param
from tests.support.launch import run_cases

FP32_TOLERANCE = 1e-6  # relative
BF16_TOLERANCE = 5e-4
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
# representative layouts for the variants of the model
REPRESENTATIVE = ("zero0", "zero2", "zero3", "pipeline2_zero1", "pipeline2_data2_zero1")
STEPS = 6
SHORTER = "0:16,2e3:32,4096:64"  # tokens; a step has 1024
BF16_LAYOUTS = (*REPRESENTATIVE,
                "zero3_cpu_all", "zero3_nvme_all", "pipeline2_zero0")


def _flags(corpus: str, **others: Any) -> dict[str, Any]:
    return flags(corpus, steps=STEPS, **others)


def _layouts(swap: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """Return {number of ranks: {name: JSON}}. Every global batch is 16. The reference is "zero0" on one rank."""
    two = {
        "zero0": config(0), "zero1": config(1), "zero2": config(2), "zero3": config(3),
        "zero2_micro2": config(2, micro=2, accumulation=4), "zero2_cpu": config(2, offload_optimizer=CPU),
        "zero3_cpu_optimizer": config(3, offload_optimizer=CPU),
        "zero3_cpu_all": config(3, offload_optimizer=CPU, offload_param=CPU),
        "pipeline2_zero0": config(0, stages=2, accumulation=4), "pipeline2_zero1": config(1, stages=2, accumulation=4),
        "pipeline2_micro2": config(1, stages=2, micro=2, accumulation=8),
        "pipeline2_cpu": config(1, stages=2, accumulation=4, offload_optimizer=CPU),
    }
    if not NO_NVME:
        two |= {"zero3_nvme_optimizer": config(3, offload_optimizer=nvme(swap)),
                "zero3_nvme_all": config(3, offload_optimizer=nvme(swap), offload_param=nvme_param(swap))}
    four = {"pipeline2_data2_zero0": config(0, stages=2), "pipeline2_data2_zero1": config(1, stages=2),
            "pipeline4_zero0": config(0, stages=4, accumulation=4),
            "pipeline4_zero1": config(1, stages=4, accumulation=4),
            "zero3_hpz2": config(3, accumulation=1, zero_hpz_partition_size=2),
            "zero3_hpz4_cpu": config(3, accumulation=1, zero_hpz_partition_size=4, offload_optimizer=CPU)}
    one = {"zero0": config(0, accumulation=4), "zero0_micro2": config(0, micro=2, accumulation=8),
           "zero3": config(3, accumulation=4)}
    return {1: one, 2: two, 4: four}


def _cases(layouts: dict[str, dict[str, Any]], corpus: str, llama: Path, ranks: int) -> list[dict[str, Any]]:
    cases = [case(name, "losses", values, _flags(corpus)) for name, values in layouts.items()]
    masked, shorter = {"eod_mask_loss": True}, {"seq_length_schedule": SHORTER}
    chosen = [name for name in REPRESENTATIVE if name in layouts and (ranks == 1) == (name == "zero0")]
    cases += [case(f"masked_shorter_{name}", "losses", layouts[name], _flags(corpus, **masked, **shorter))
              for name in chosen]
    if ranks == 1:
        cases += [case("masked_zero0", "losses", layouts["zero0"], _flags(corpus, **masked)),
                  case("shorter_zero0", "losses", layouts["zero0"], _flags(corpus, **shorter))]
    of_llama = {**_flags(corpus), "model": str(llama)}
    del of_llama["model_overrides"]
    cases += [case(f"llama_{name}", "losses", layouts[name], of_llama) for name in chosen]
    for name in layouts:
        if name in BF16_LAYOUTS and (ranks != 1 or name == "zero0"):
            values = {**layouts[name], "bf16": {"enabled": True}}
            cases.append(case(f"bf16_{name}", "losses", values, _flags(corpus)))
    if ranks == 2:
        for name, stages in (("bf16_fp32_accumulation", 1), ("bf16_pipeline2_fp32_accumulation", 2)):
            values = config(1, precision="bf16", stages=stages, accumulation=2 * stages)
            values["data_types"] = {"grad_accum_dtype": "fp32"}
            cases.append(case(name, "losses", values, _flags(corpus)))
        cases += [case(f"bf16_{name}_plain_operators", "losses", {**layouts[name], "bf16": {"enabled": True}},
                       _flags(corpus, plain_operators=True)) for name in ("zero2", "pipeline2_zero1")]
    return cases


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of every layout. A key has the name and the number of ranks, such as "zero3@2"."""
    folder = tmp_path_factory.mktemp("parity")
    llama = folder / "llama.json"
    llama.write_text(json.dumps(LLAMA))
    (folder / "swap").mkdir()
    found = {}
    for ranks, layouts in _layouts(folder / "swap").items():
        rows = run_cases(_cases(layouts, corpus, llama, ranks), ranks, folder / str(ranks))
        found.update({f"{name}@{ranks}": row for name, row in rows.items()})
    return found


def _worst(row: dict[str, Any], reference: dict[str, Any], key: str) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(row[key], reference[key], strict=True))


def _assert_parity(results: dict[str, dict[str, Any]], names: list[str], reference: str, tolerance: float,
                   subtests: pytest.Subtests) -> None:
    assert len(names) >= 3
    norm_tolerance = 1e-5 if tolerance == FP32_TOLERANCE else 2e-2
    for name in names:
        with subtests.test(name):
            assert len(results[name]["loss"]) == STEPS
            assert _worst(results[name], results[reference], "loss") <= tolerance
            assert _worst(results[name], results[reference], "grad_norm") <= norm_tolerance
            evaluated, expected = results[name]["eval_loss"], results[reference]["eval_loss"]
            assert abs(evaluated - expected) / expected <= tolerance


def _of(results: dict[str, dict[str, Any]], prefix: str) -> list[str]:
    return [name for name in results if name.startswith(prefix)]


def test_fp32_losses_are_equal_in_every_layout(results: dict[str, dict[str, Any]],
                                               subtests: pytest.Subtests) -> None:
    names = [name for name in results if not name.startswith(("masked", "shorter", "llama", "bf16"))]
    assert len(names) >= (17 if NO_NVME else 19)
    _assert_parity(results, names, "zero0@1", FP32_TOLERANCE, subtests)


def test_copies_of_parameters_never_differ(results: dict[str, dict[str, Any]]) -> None:
    assert {name: row["differing_copies"] for name, row in results.items() if row["differing_copies"]} == {}
    compared = {name: row["copies"] for name, row in results.items()}
    assert compared["zero0@1"] == []
    assert compared["zero3@2"][0] > 0, "parameters that are not partitioned"
    assert compared["zero0@2"][0] > compared["zero1@2"][0] > 0, "optimizer states"
    assert compared["pipeline2_data2_zero1@4"][1] == 1, "the tied embedding"


@pytest.mark.parametrize("kind", ["masked_shorter", "llama"])
def test_fp32_losses_of_model_variants_are_equal_in_every_layout(kind: str, results: dict[str, dict[str, Any]],
                                                                 subtests: pytest.Subtests) -> None:
    _assert_parity(results, _of(results, kind), f"{kind}_zero0@1", FP32_TOLERANCE, subtests)


def test_masks_and_shorter_sequences_change_the_loss(results: dict[str, dict[str, Any]]) -> None:
    """Each of them by itself, and also in addition to the other one."""
    for kind in ("masked", "shorter"):
        for other in ("", "masked_shorter_"):
            assert _worst(results[f"{kind}_zero0@1"], results[f"{other}zero0@1"], "loss") > 100 * FP32_TOLERANCE


def test_bf16_losses_are_close_in_every_layout(results: dict[str, dict[str, Any]], subtests: pytest.Subtests) -> None:
    _assert_parity(results, _of(results, "bf16"), "bf16_zero0@1", BF16_TOLERANCE, subtests)
    assert _worst(results["bf16_zero0@1"], results["zero0@1"], "loss") <= BF16_TOLERANCE


def test_the_model_learns(results: dict[str, dict[str, Any]]) -> None:
    rows = results["zero0@1"]["loss"]
    assert rows[-1] < rows[0] - 0.1


def test_layouts_have_the_expected_engine_and_optimizer(results: dict[str, dict[str, Any]]) -> None:
    assert results["pipeline2_zero1@2"]["pipeline"]
    assert results["zero3@2"]["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert results["bf16_fp32_accumulation@2"]["optimizer"] == "BF16_Optimizer"


@pytest.mark.skipif(bool(NO_NVME), reason=f"NVMe offload: {NO_NVME}")
def test_nvme_layouts_were_compared(results: dict[str, dict[str, Any]]) -> None:
    assert {"zero3_nvme_optimizer@2", "zero3_nvme_all@2", "bf16_zero3_nvme_all@2"} <= results.keys()
