"""muP on real engines: activations do not depend on the width, losses do not depend on the layout."""

import math
from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_cases
from tests.support.layouts import SAVED, STEPS, dp2, pp2, relative_difference, run_layouts

WIDTHS, BASE = (64, 128, 256, 512), 64
LAYOUTS = {"zero0": dp2(0), "zero1": dp2(1), "zero2_cpu": dp2(2, offload_optimizer=CPU), "zero3": dp2(3),
           "pipeline2_zero0": pp2(0), "pipeline2_zero1": pp2(1), "pipeline2_cpu": pp2(1, offload_optimizer=CPU)}
PAIRS = (("pipeline2_zero1", "zero3"), ("zero3", "pipeline2_zero1"), ("pipeline2_cpu", "pipeline2_cpu"),
         ("zero0", "pipeline2_zero0"))


def _flags(corpus: str, width: int, **others: Any) -> dict[str, Any]:
    """Return the flags of a model whose heads have 16 elements at every width."""
    overrides = f"n_head={width // 16},tie_word_embeddings=false"
    return {**flags(corpus, layers=2, hidden=width, overrides=overrides, seq_length=32), **others}


@pytest.fixture(scope="module")
def widths(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of four steps at a rate that is high for the wide models, by width, with and without muP."""
    constant = {"train_steps": 4, "lr_schedule": "constant", "lr_warmup_steps": 0}
    values = config(0, micro=8, accumulation=1, lr=0.01)
    cases = [case(f"{width}{name}", "mup", values, _flags(corpus, width, **constant, **muP))
             for width in WIDTHS for name, muP in (("", {}), ("_mup", {"mup_base_width": BASE}))]
    return run_cases(cases, 1, tmp_path_factory.mktemp("widths"))


def _growth(widths: dict[str, Any], suffix: str) -> tuple[float, float]:
    """Return how the outputs of the blocks, and the logits, of the widest model compare with the narrowest one's."""
    narrow, wide = (widths[f"{width}{suffix}"]["sizes"] for width in (WIDTHS[0], WIDTHS[-1]))
    ratios = {name: wide[name] / narrow[name] for name in narrow}
    assert len(ratios) == 5
    logits = ratios.pop("5.lm_head")
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)), logits


def test_activations_after_some_steps_do_not_depend_on_the_width(widths: dict[str, Any]) -> None:
    """The coordinate check of Tensor Programs V (arXiv 2203.03466, appendix D.1)."""
    assert all(0.6 < ratio < 1.6 for ratio in _growth(widths, "_mup"))
    blocks, logits = _growth(widths, "")
    assert blocks > 20
    assert logits > 4
    for width in WIDTHS:
        loss = widths[f"{width}_mup"]["loss"]
        assert loss[-1] < loss[0], width


def test_the_base_model_trains_as_without_mup(widths: dict[str, Any]) -> None:
    assert widths["64_mup"]["loss"] == widths["64"]["loss"]


def test_matrices_learn_more_slowly_and_vectors_do_not_decay(widths: dict[str, Any]) -> None:
    rates = widths["512_mup"]["rates"]
    assert len(rates) == 2 + 2 * 12 + 2 + 1
    for name, (rate, decay) in rates.items():
        vector = name.endswith("bias") or "norm" in name
        assert rate == (0.01 if vector or name.endswith("embedding") else 0.01 / 8), name
        assert decay == (0 if vector else 0.1), name
    assert widths["512_mup"]["lr"] == [0.01] * 4  # the base rate is logged


@pytest.fixture(scope="module")
def layouts(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a run in each layout that saves a checkpoint, and of runs that load it."""
    folder = tmp_path_factory.mktemp("mup_layouts")
    run_flags = _flags(corpus, 128, mup_base_width=32, init_method="small_init", output_init_method="wang_init",
                       train_steps=STEPS, lr_warmup_steps=2)
    saved = run_layouts({name: (2, case(name, "train_and_save", values, run_flags, saved_step=SAVED))
                         for name, values in LAYOUTS.items()}
                        | {"upstream": (2, case("upstream", "norm_reductions", LAYOUTS["pipeline2_zero1"], run_flags))},
                        folder / "save")
    return saved | run_layouts({f"{a}-{b}": (2, case(f"{a}-{b}", "resume", LAYOUTS[b], run_flags, saved_step=SAVED,
                                                     used=1, source=saved[a]["folder"])) for a, b in PAIRS},
                               folder / "load")


def test_losses_are_equal_in_every_layout(layouts: dict[str, Any], subtests: pytest.Subtests) -> None:
    reference = layouts["zero0"]
    for name in LAYOUTS:
        with subtests.test(name):
            for part in ("before", "after"):
                assert relative_difference(layouts[name][part]["loss"], reference[part]["loss"]) < 1e-6
                assert relative_difference(layouts[name][part]["grad_norm"], reference[part]["grad_norm"]) < 1e-5
                assert layouts[name][part]["lr"] == reference[part]["lr"]


def test_deepspeed_reduces_the_norm_of_each_group(layouts: dict[str, Any]) -> None:
    """If this fails, DeepSpeed reduces once for all groups: delete reduce_norm_once in patches/pipeline.py."""
    assert layouts["upstream"] == [3, 2]  # only the first stage has embeddings; the stages would wait forever


def test_a_resume_in_another_layout_keeps_the_learning_rates(layouts: dict[str, Any],
                                                             subtests: pytest.Subtests) -> None:
    for a, b in PAIRS:
        with subtests.test(f"{a}-{b}"):
            found, expected = layouts[f"{a}-{b}"]["after"], layouts["zero0"]["after"]
            assert relative_difference(found["loss"], expected["loss"]) < 1e-6
            assert found["lr"] == pytest.approx(expected["lr"])
