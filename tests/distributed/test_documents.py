"""--document_attention on real engines: equal losses in every layout, and resumes that continue with the same bits."""

from typing import Any

import pytest

from tests.support.cases import DROPOUT, case, config, flags
from tests.support.launch import run_cases
from tests.support.layouts import relative_difference

FP32_TOLERANCE, BF16_TOLERANCE = 1e-6, 5e-4  # relative
UNTIED = "tie_word_embeddings=false"
RESUMED = {"resume_zero3": config(3, precision="bf16", checkpoint_every=1),
           "resume_pipeline2": config(1, precision="bf16", stages=2, accumulation=4)}
# every global batch is 16 samples
LAYOUTS = {
    "zero0": config(0), "zero1": config(1), "zero2": config(2), "zero3": config(3),
    "zero3_checkpointing": config(3, checkpoint_every=2), "pipeline1_checkpointing": config(1, checkpoint_every=2),
    "pipeline2_zero0": config(0, stages=2, accumulation=4), "pipeline2_zero1": config(1, stages=2, accumulation=4),
    "pipeline2_checkpointing": config(1, stages=2, accumulation=4, checkpoint_every=1),
}
BF16 = {"zero0": config(0, precision="bf16"), "zero2": config(2, precision="bf16"),
        "pipeline2_zero1": config(1, precision="bf16", stages=2, accumulation=4)}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all cases on two ranks."""
    usual = flags(corpus, steps=4, document_attention=True)
    cases = [case(name, "losses", values, usual) for name, values in LAYOUTS.items()]
    cases += [case(f"untied_{name}", "losses", LAYOUTS[name], flags(corpus, steps=4, document_attention=True,
                                                                   overrides=UNTIED))
              for name in ("zero0", "zero3", "pipeline2_zero1")]
    cases += [case(f"bf16_{name}", "losses", values, usual) for name, values in BF16.items()]
    cases += [case("off", "losses", LAYOUTS["zero0"], flags(corpus, steps=4)),
              case("curriculum", "losses", LAYOUTS["zero2"], {**usual, "seq_length_schedule": "0:16,2048:64"}),
              case("curriculum_sequence2", "losses", {**config(3, accumulation=4), "sequence_parallel_size": 2},
                   {**usual, "seq_length_schedule": "0:16,2048:64"}),
              case("curriculum_pipeline2", "losses", LAYOUTS["pipeline2_zero1"],
                   {**usual, "seq_length_schedule": "0:16,2048:64"})]
    dropout = flags(corpus, steps=4, overrides=DROPOUT, document_attention=True)
    cases += [case(name, "resume", values, dropout) for name, values in RESUMED.items()]
    return run_cases(cases, 2, tmp_path_factory.mktemp("documents"))


def _differ(results: dict[str, Any], name: str, reference: str) -> float:
    return max(relative_difference(results[name]["loss"], results[reference]["loss"]),
               relative_difference([results[name]["eval_loss"]], [results[reference]["eval_loss"]]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_losses_are_equal_in_every_layout(results: dict[str, Any], name: str) -> None:
    assert _differ(results, name, "zero0") <= FP32_TOLERANCE
    assert results[name]["differing_copies"] == ""
    assert relative_difference(results[name]["grad_norm"], results["zero0"]["grad_norm"]) <= 1e-5
    assert results[name]["pipeline"] == (name.startswith("pipeline") or name in ("zero0", "zero1"))


@pytest.mark.parametrize("name", ["untied_zero3", "untied_pipeline2_zero1"])
def test_untied_embeddings(results: dict[str, Any], name: str) -> None:
    assert _differ(results, name, "untied_zero0") <= FP32_TOLERANCE


@pytest.mark.parametrize("name", BF16)
def test_bf16_losses_are_close_in_every_layout(results: dict[str, Any], name: str) -> None:
    assert _differ(results, f"bf16_{name}", "zero0") <= BF16_TOLERANCE


def test_documents_and_shorter_sequences_change_the_loss(results: dict[str, Any]) -> None:
    assert _differ(results, "off", "zero0") > 100 * FP32_TOLERANCE
    assert _differ(results, "curriculum", "zero0") > 100 * FP32_TOLERANCE
    assert _differ(results, "curriculum_pipeline2", "curriculum") <= FP32_TOLERANCE
    assert _differ(results, "curriculum_sequence2", "curriculum") <= FP32_TOLERANCE


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_with_dropout_and_recomputation_continues_with_the_same_bits(results: dict[str, Any],
                                                                              name: str) -> None:
    row = results[name]
    at_save, loaded, at_end, again = row["state"]
    assert (at_save, at_end) == (loaded, again)
    assert row["tail"] == row["resumed"]
