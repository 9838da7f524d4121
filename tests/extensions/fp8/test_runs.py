"""--fp8 on real engines of two ranks: the same losses in every layout, resumes, and checkpoints as without it.

The slow test trains 200 steps with and without it, resumes and exports.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.extensions.fp8.installed import HAS_FP8
from tests.support.cases import CPU, NO_NVME, case, config, flags, nvme, nvme_param
from tests.support.launch import run_worker
from tests.support.layouts import relative_difference

STAGES2 = {"stages": 2, "micro": 4, "accumulation": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # (JSON, flags)
    "zero1": (config(1, precision="bf16"), {}),
    "zero2_compiled": (config(2, precision="bf16"), {"compile_blocks": True}),
    "zero3_recomputed": (config(3, precision="bf16", param_persistence_threshold=0), {"recompute": "mlp"}),
    "pipeline2": (config(1, precision="bf16", **STAGES2), {"recompute": "blocks"}),
}
SAVED = config(3, precision="bf16")
RECIPES = ("tensorwise", "rowwise")
SHARED = {"sequence_parallel_size": 2}  # two ranks share each sequence
MORE: dict[str, dict[str, Any]] = {
    "zero1_cpu": config(1, precision="bf16", offload_optimizer=CPU),
    "zero2_cpu": config(2, precision="bf16", offload_optimizer=CPU),
    "zero3_cpu": config(3, precision="bf16", offload_optimizer=CPU, offload_param=CPU, param_persistence_threshold=0),
    **{f"zero{stage}_sequence2": {**config(stage, precision="bf16", accumulation=4), **SHARED} for stage in (1, 2, 3)},
    "zero3_cpu_sequence2": {**config(3, precision="bf16", accumulation=4, offload_optimizer=CPU, offload_param=CPU),
                            **SHARED},
}
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="this torch has no torchao that fits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def results(corpus: str, folder: Path) -> dict[str, Any]:
    common = flags(corpus, layers=2, steps=2)
    cases = [*(case(name, "train", values, {**common, **extra, "fp8": "tensorwise"})
               for name, (values, extra) in LAYOUTS.items()),
             case("saved_bf16", "resume", SAVED, common),
             case("saved_fp8", "resume", SAVED, {**common, "fp8": "rowwise"})]
    return run_worker("compile_worker.py", cases, 2, folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_close_to_those_of_bf16_and_of_other_layouts(name: str, results: dict[str, Any]) -> None:
    found, zero1, saved = results[name], results["zero1"], results["saved_bf16"]
    bf16 = {key: saved["before"][key] + saved["tail"][key] for key in ("loss", "grad_norm")}
    assert found["loss"] != bf16["loss"]
    assert relative_difference(found["loss"], bf16["loss"]) < 2e-3
    assert relative_difference(found["grad_norm"], bf16["grad_norm"]) < 0.05
    assert relative_difference(found["loss"], zero1["loss"]) < 1e-3
    assert (found["graphs"], found["breaks"]) == (2 if "compiled" in name else 0, 0)
    assert (found["saved_weights"] > 0) == name.startswith("zero3")
    assert found["largest_kept_weight"] == 0


def test_a_resume_has_the_same_bits(results: dict[str, Any]) -> None:
    found, bf16 = results["saved_fp8"], results["saved_bf16"]
    assert relative_difference(found["tail"]["loss"], bf16["tail"]["loss"]) < 2e-3
    assert found["resumed"] == found["tail"]
    at_save, loaded, at_end, resumed_end = found["state"]
    assert (loaded, resumed_end) == (at_save, at_end)


def test_a_checkpoint_has_the_same_files_and_sizes_as_without(results: dict[str, Any], folder: Path) -> None:
    def files(name: str) -> dict[str, int]:
        base = folder / f"run-{name}" / "checkpoints"
        return {str(path.relative_to(base)): path.stat().st_size for path in base.rglob("*")
                if path.is_file() and path.suffix != ".json"}

    assert files("saved_fp8") == files("saved_bf16")
    assert files("saved_fp8")


@pytest.fixture(scope="module")
def more(corpus: str, folder: Path) -> dict[str, Any]:
    layouts = {**MORE, "bf16": SAVED}
    if not NO_NVME:
        offload = {"offload_optimizer": nvme(folder), "offload_param": nvme_param(folder)}
        layouts["zero3_nvme"] = config(3, precision="bf16", **offload)
    common = flags(corpus, layers=2, steps=3)
    cases = [case(f"{name}_{fp8}", "train", values, {**common, "fp8": fp8} if name != "bf16" else common)
             for name, values in layouts.items() for fp8 in RECIPES]
    return run_worker("compile_worker.py", cases, 2, folder / "more")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", RECIPES)
@pytest.mark.parametrize("name", [*MORE, "zero3_nvme"])
def test_losses_with_offload_or_sequence_parallelism(name: str, fp8: str, more: dict[str, Any]) -> None:
    if name == "zero3_nvme" and NO_NVME:
        pytest.skip(NO_NVME)
    found, bf16, first = (more[f"{layout}_{fp8}"] for layout in (name, "bf16", "zero1_cpu"))
    assert found["loss"] != bf16["loss"]
    assert relative_difference([*found["loss"], found["eval"]], [*bf16["loss"], bf16["eval"]]) < 2e-3
    assert relative_difference(found["grad_norm"], bf16["grad_norm"]) < 0.05
    assert relative_difference(found["loss"], first["loss"]) < 1e-3


@pytest.mark.slow
def test_200_steps_learn_as_much_as_in_bf16(corpus: str, tmp_path: Path) -> None:
    """Within 0.25% of the loss, as the report on DeepSeek-V3 found. The numbers are in the page of the extension."""
    common = flags(corpus, layers=2, hidden=128, steps=200)
    cases = [case(name, "train", config(1, precision="bf16", micro=8, accumulation=1, lr=3e-3), {**common, **extra})
             for name, extra in (("bf16", {}), ("tensorwise", {"fp8": "tensorwise"}), ("rowwise", {"fp8": "rowwise"}))]
    found = run_worker("compile_worker.py", cases, 1, tmp_path)
    last = {name: sum(result["loss"][-20:]) / 20 for name, result in found.items()}
    print(f"mean loss of the last 20 steps: {last}; first: {found['bf16']['loss'][0]}; "
          f"evaluated: { {name: result['eval'] for name, result in found.items()} }")
    assert last["bf16"] < found["bf16"]["loss"][0] - 2
    for name in ("tensorwise", "rowwise"):
        assert relative_difference([last[name], found[name]["eval"]], [last["bf16"], found["bf16"]["eval"]]) < 2.5e-3
