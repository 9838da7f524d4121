"""Weight decay on real engines: which parameters decay, in every layout, and with --no_weight_decay."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config.model_of_run import undecayed_names
from pretrain.engine.optimizer import mup_parameter_groups, parameter_groups
from pretrain.errors import ConfigError
from pretrain.model.config import load_model_config
from tests.support.cases import CPU, case, flags
from tests.support.layouts import dp2, fp16, pp2, relative_difference, run_layouts
from tests.support.model_shapes import SHAPES, write_config

RATE, DECAY = 0.01, 0.1  # the weight decay is from cases.config
# the token embedding, some matrices, and all matrices of the second pipeline stage, which then has one group less
EXCLUDED = ["embeddings", "*.mlp.down.weight", "2.attention.qkv.weight", "[45].*.weight"]
LAYOUTS = {"zero0": dp2(0), "zero1": dp2(1), "zero2": dp2(2), "zero2_cpu": dp2(2, offload_optimizer=CPU),
           "zero3": dp2(3), "zero3_cpu": dp2(3, offload_optimizer=CPU, offload_param=CPU), "pipeline2_zero0": pp2(0),
           "pipeline2_zero1": pp2(1), "pipeline2_cpu": pp2(1, offload_optimizer=CPU)}
BF16 = {"zero0_bf16": dp2(0, precision="bf16"), "pipeline2_zero1_bf16": pp2(1, precision="bf16")}
OTHERS = {"adam": ("Adam", dp2(2)), "sgd": ("SGD", pp2(1)), "lion": ("Lion", dp2(3, offload_optimizer=CPU))}


def _with_optimizer(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": RATE, "weight_decay": DECAY}
    if kind == "SGD":
        params["momentum"] = 0.9
    return {**values, "optimizer": {"type": kind, "params": params}}


def _flags(corpus: str, **others: Any) -> dict[str, Any]:
    return {**flags(corpus, seq_length=32, steps=3), "lr_schedule": "constant", "lr_warmup_steps": 0, **others}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the result of the job `decay` of each layout, without and with --no_weight_decay, and with muP."""
    cases = {}
    for name, values in {**LAYOUTS, **BF16}.items():
        values["optimizer"]["params"]["lr"] = RATE
        cases[f"{name}-excluded"] = (values, _flags(corpus, no_weight_decay=EXCLUDED))
        if name in ("zero1", "zero3", "pipeline2_zero0", "zero2_cpu"):
            cases[name] = (values, _flags(corpus))
        if name in ("zero3", "pipeline2_zero1", "pipeline2_cpu"):
            cases[f"{name}-mup"] = (values, _flags(
                corpus, no_weight_decay=EXCLUDED, mup_base_width=32,
                model_overrides="vocab_size=256,n_layer=4,n_embd=64,n_head=4,tie_word_embeddings=false"))
    for name, (kind, values) in OTHERS.items():
        cases[f"{name}-excluded"] = (_with_optimizer(kind, values), _flags(corpus, no_weight_decay=EXCLUDED))
    return run_layouts({name: (2, case(name, "decay", values, run_flags)) for name, (values, run_flags) in
                        cases.items()}, tmp_path_factory.mktemp("groups"))


def _should_decay(name: str, excluded: bool, *, tied: bool = True) -> bool:
    """Return whether a parameter of the tiny model decays. This repeats the rule in other words."""
    if name.endswith((".bias", "norm.weight", "norm1.weight", "norm2.weight")):
        return False
    if not excluded:
        return True
    if name in (("tied_modules.embed.embedding",) if tied else ("0.embedding",)) or name == "1.embedding":
        return False
    return not any(fnmatchcase(name, pattern) for pattern in EXCLUDED[1:])


def test_exactly_the_matrices_decay_in_every_layout(results: dict[str, Any], subtests: pytest.Subtests) -> None:
    for name, result in results.items():
        excluded, tied = name.endswith(("-excluded", "-mup")), not name.endswith("-mup")
        with subtests.test(name):
            assert len(result["decays"]) == 2 + 4 * 12 + 2 + (0 if tied else 1)
            rate = {True: RATE}.get(tied)
            for parameter, (decay, ratio) in result["decays"].items():
                decays = _should_decay(parameter, excluded, tied=tied)
                assert decay == (DECAY if decays else 0), parameter
                own = rate or (RATE if parameter.endswith("embedding") else RATE / 2)  # muP: half of the rate
                expected = 1 - own * DECAY if decays else 1.0
                # the CPU kernel of Lion takes the sign of 0 as 1 or -1 (csrc/lion/cpu_lion_impl.cpp)
                assert name.startswith("lion") or ratio == pytest.approx(expected, abs=2e-6), parameter


def test_the_losses_are_those_of_one_layout(results: dict[str, Any], subtests: pytest.Subtests) -> None:
    for name in LAYOUTS:
        with subtests.test(name):
            assert relative_difference(results[f"{name}-excluded"]["loss"], results["zero0-excluded"]["loss"]) < 1e-6
            assert relative_difference(results[f"{name}-excluded"]["grad_norm"],
                                       results["zero0-excluded"]["grad_norm"]) < 1e-5


def test_vectors_decay_if_the_run_says_so() -> None:
    shapes = {"0.embedding": (4, 2), "1.norm.weight": (2,), "1.mlp.weight": (2, 2), "1.mlp.bias": (2,)}
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    names = {id(parameter): name for name, parameter in named.items()}

    def found(groups: list[dict[str, Any]]) -> list[tuple[list[str], float | None]]:
        return [([names[id(parameter)] for parameter in group["params"]], group.get("weight_decay"))
                for group in groups]

    assert found(parameter_groups(named.items(), decay_vectors=True)) == [(list(shapes), None)]
    assert found(parameter_groups(named.items(), {"1.norm.weight"}, decay_vectors=True)) == [
        (["0.embedding", "1.mlp.weight", "1.mlp.bias"], None), (["1.norm.weight"], 0.0)]
    assert found(mup_parameter_groups(named.items(), learning_rate=1.0, multiplier=2.0, decay_vectors=True,
                                      undecayed={"1.mlp.bias"})) == [
        (["0.embedding", "1.norm.weight"], None), (["1.mlp.bias"], 0.0), (["1.mlp.weight"], None)]


def test_unmatched_names_are_rejected_with_near_ones(tmp_path: Path) -> None:
    model = load_model_config(write_config(tmp_path, SHAPES["llama"]))
    assert undecayed_names(None, model) == set()
    assert {name.partition(".")[2] for name in undecayed_names(["*.mlp.*"], model)} >= {"mlp.down.weight"}
    for pattern, advice in (("*.mlp.donw.weight", r'Did you mean "\*\.mlp\.down\.weight"\?'),
                            ("embedding", r'Did you mean "embeddings"\?'), ("mlp.down", r'"\*mlp\.down\*" matches'),
                            ("conv1d", r"the names are embeddings, .*\*\.mlp\.down\.weight")):
        with pytest.raises(ConfigError, match=rf"(?i)--no_weight_decay: .* of no parameter.*{advice}"):
            undecayed_names([pattern], model)


@pytest.fixture(scope="module")
def resumed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the losses of a run with --no_weight_decay, and of runs that resume it in other layouts."""
    folder = tmp_path_factory.mktemp("resumed")
    run_flags = {**_flags(corpus, no_weight_decay=EXCLUDED), "train_steps": 5}
    saved = run_layouts({"saved": (2, case("saved", "train_and_save", LAYOUTS["pipeline2_zero1"], run_flags,
                                           saved_step=2))}, folder / "save")
    cases = {name: (2, case(name, "resume", LAYOUTS[name], run_flags, saved_step=2, used=1,
                            source=saved["saved"]["folder"])) for name in ("zero3", "zero2_cpu", "pipeline2_zero1")}
    unfused = {**_with_optimizer("SGD", fp16(pp2(0)))}
    cases["unfused"] = (2, case("unfused", "build_and_fail", unfused, {**run_flags, "emulate_fp16": True}))
    return saved | run_layouts(cases, folder / "load")


def test_a_resume_in_another_layout_keeps_the_groups(resumed: dict[str, Any], subtests: pytest.Subtests) -> None:
    for name in ("zero3", "zero2_cpu", "pipeline2_zero1"):
        with subtests.test(name):
            assert relative_difference(resumed[name]["after"]["loss"], resumed["saved"]["after"]["loss"]) < 1e-6


def test_different_groups_of_pipeline_stages_are_rejected_where_deepspeed_would_hang(resumed: dict[str, Any]) -> None:
    assert all("--no_weight_decay: the pipeline stages have different parameter groups" in error
               for error in resumed["unfused"]["errors"])
