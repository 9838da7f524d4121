"""--fp8 on real engines of two ranks: the same losses in every layout, resumes, and checkpoints as without it.

The slow test trains 200 steps with and without it, resumes and exports.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import HAS_FP8, case, config, flags
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


@pytest.mark.slow
def test_200_steps_learn_as_much_as_in_bf16(corpus: str, tmp_path: Path) -> None:
    """Within 0.25% of the loss, as the report on DeepSeek-V3 found. The numbers are in tools/gpu.md."""
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
