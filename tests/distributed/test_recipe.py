"""Loss terms, clipping and the gradient noise scale on real engines, compared with autograd; the resume of their state.

A step of each layout has label smoothing, z-loss, unequal token weights, value clipping and norm clipping, and all of
them change the result.
"""

from typing import Any

import pytest

from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_worker

UNTIED = "tie_word_embeddings=false"
TERMS = {"label_smoothing": 0.1, "z_loss": 0.01}
ADAM = {"type": "AdamW", "params": {"lr": 1.0, "betas": [0, 0], "eps": 1.0, "weight_decay": 0}}
FP32_SUM = {"data_types": {"grad_accum_dtype": "fp32"}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10}}
TOLERANCES = {"fp32": 2e-5, "bf16": 4e-2, "fp16": 5e-3}

LAYOUTS: dict[str, dict[str, Any]] = {  # in the default run; all on 2 ranks
    "fp32_zero0_pipeline2": config(0, stages=2),
    "fp32_zero2_cpu": config(2, offload_optimizer=CPU),
    "fp32_zero3": config(3),
    "fp32_zero3_cpu": config(3, offload_optimizer=CPU),
    "bf16_zero1_fp32_sum": {**config(1, precision="bf16"), **FP32_SUM},
    "fp16_zero0_pipeline2": {**config(0, stages=2), **FP16},
    "fp16_zero1": {**config(1), **FP16},
    "fp16_zero3": {**config(3), **FP16},
}
MORE_LAYOUTS = {
    "fp32_zero0": config(0),
    "fp32_zero1_pipeline2": config(1, stages=2),
    "bf16_zero1_pipeline2_cpu_fp32_sum": {**config(1, precision="bf16", stages=2, offload_optimizer=CPU), **FP32_SUM},
    "bf16_zero0_pipeline2": config(0, precision="bf16", stages=2),
    "bf16_zero2": config(2, precision="bf16"),
    "bf16_zero3_cpu_parameters": config(3, precision="bf16", offload_optimizer=CPU, offload_param=CPU),
    "fp16_zero2": {**config(2), **FP16},
    "fp16_zero2_cpu": {**config(2, offload_optimizer=CPU), **FP16},
    "fp16_zero3_cpu": {**config(3, offload_optimizer=CPU), **FP16},
}
NOISE = {  # layouts of the noise scale, which need untied embeddings on several stages
    "noise_fp32_zero0_pipeline2": config(0, stages=2), "noise_fp32_zero1": config(1), "noise_fp32_zero3": config(3),
    "noise_fp16_zero2": {**config(2), **FP16},
}


def step_case(name: str, values: dict[str, Any], corpus: str, **others: Any) -> dict[str, Any]:
    values = {**values, "optimizer": ADAM}
    run_flags = flags(corpus, layers=2, hidden=32, lr_schedule="constant", lr_warmup_steps=0, steps=4, **TERMS,
                      **others)
    return case(name, "one_step", values, run_flags | ({"emulate_fp16": True} if "fp16" in values else {}))


def clipped_case(name: str, values: dict[str, Any], corpus: str) -> dict[str, Any]:
    return step_case(name, {**values, "gradient_clipping": 0.1}, corpus, gradient_value_clipping=0.004)


def noise_case(name: str, values: dict[str, Any], corpus: str) -> dict[str, Any]:
    return step_case(name, values, corpus, overrides=UNTIED, noise_scale_interval=1)


def adaptive_case(name: str, values: dict[str, Any], corpus: str, **others: Any) -> dict[str, Any]:
    run_flags = flags(corpus, layers=2, hidden=32, steps=12, lr_warmup_steps=2, overrides=UNTIED, adaptive_clipping=50,
                      adaptive_clipping_window=4, noise_scale_interval=2)
    return case(name, "resumed", {**values, "gradient_clipping": 5.0}, run_flags, **others)


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cases = [*(clipped_case(name, values, corpus) for name, values in LAYOUTS.items()),
             *(noise_case(name, values, corpus) for name, values in NOISE.items()),
             adaptive_case("adaptive_zero0_pipeline2", config(0, stages=2, accumulation=4, micro=2), corpus),
             adaptive_case("adaptive_zero1", config(1, micro=2), corpus),
             adaptive_case("adaptive_zero3", config(3, micro=2), corpus, **{"from": "adaptive_zero1"}),
             adaptive_case("adaptive_pipeline", config(1, stages=2, micro=2, accumulation=4), corpus,
                           **{"from": "adaptive_zero1"})]
    return run_worker("recipe_worker.py", cases, 2, tmp_path_factory.mktemp("recipe"))


def assert_equals_autograd(layout: str, result: dict[str, Any]) -> None:
    tolerance = TOLERANCES[layout.removeprefix("noise_")[:4]]
    assert result["error"] < tolerance, f"{result['optimizer']}: another gradient"
    assert result["norm"][0] == pytest.approx(result["norm"][1], rel=tolerance)
    assert result["loss"][0] == pytest.approx(result["loss"][1], rel=tolerance / 4), "not the cross-entropy"
    assert result["values"]["z_loss"] == pytest.approx(result["z_loss"], rel=tolerance)
    assert len(set(result["evaluation"])) == 1
    assert result["skipped"] == [1, 1], "an infinite gradient was clipped and applied"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_clipped_gradient_equals_that_of_autograd(layout: str, results: dict[str, Any]) -> None:
    result = results[layout]
    assert_equals_autograd(layout, result)
    assert 0.1 < result["norm"][1] < 0.9 * result["raw_norm"], "the limits of this test change nothing"
    assert result["stats"] == {"grad_norm_max": pytest.approx(result["norm"][0]), "clip_norm": 0.1, "clip_rate": 1.0}


@pytest.mark.parametrize("layout", NOISE)
def test_the_noise_scale_equals_that_of_the_norms_of_autograd(layout: str, results: dict[str, Any]) -> None:
    result = results[layout]
    assert_equals_autograd(layout, result)
    norms, big_batch = result["micro_norms"], 4 * len(result["micro_norms"])
    small, big = sum(norms) / len(norms), result["raw_norm"] ** 2
    noise, signal = (small - big) / (1 / 4 - 1 / big_batch), (big_batch * big - 4 * small) / (big_batch - 4)
    assert signal > 0
    assert result["values"]["noise_scale"] == pytest.approx(noise / signal, rel=20 * TOLERANCES[layout[6:10]])


@pytest.mark.parametrize("layout", ["adaptive_zero0_pipeline2", "adaptive_zero1"])
def test_the_limit_is_the_median_of_the_past_norms_and_survives_a_resume(layout: str, results: dict[str, Any]) -> None:
    result = results[layout]
    norms = result["head"]["norm"] + result["tail"]["norm"]
    limits = result["head"]["limits"] + result["tail"]["limits"]
    wanted = [5.0] * 4 + [min(5.0, sum(sorted(norms[i - 4:i])[1:3]) / 2) for i in range(4, len(norms))]
    assert [values[0] for values in limits] == pytest.approx(wanted, rel=1e-6)
    assert all(values[0] == values[1] for values in limits), "the ranks have different limits"
    clipped = result["head"]["clipped"] + result["tail"]["clipped"]
    assert clipped == [float(norm > limit[0]) for norm, limit in zip(norms, limits, strict=True)]
    assert result["again"] == result["tail"], "the resumed run differs"
    assert result["states"][0] == result["states"][1]
    scales = result["head"]["noise_scale"] + result["tail"]["noise_scale"]
    assert scales[0] is None
    assert len(set(scales[1:])) > 2


@pytest.mark.parametrize("layout", ["adaptive_zero3", "adaptive_pipeline"])
def test_another_layout_resumes_with_the_same_limits(layout: str, results: dict[str, Any]) -> None:
    tail, again = results["adaptive_zero1"]["tail"], results[layout]["again"]
    for name in ("loss", "norm"):
        assert again[name] == pytest.approx(tail[name], rel=1e-4), name
    found, wanted = ([limits[0] for limits in rows["limits"]] for rows in (again, tail))
    assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_the_clipped_gradient_equals_that_of_autograd_in_more_layouts(
        corpus: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cases = [clipped_case(name, values, corpus) for name, values in MORE_LAYOUTS.items()]
    for layout, result in run_worker("recipe_worker.py", cases, 2, tmp_path_factory.mktemp("recipe")).items():
        assert_equals_autograd(layout, result)
