"""A bit that flips in one copy of a parameter is found at the next check, which names the rank and the parameter.

tests/distributed/test_parity.py checks that copies never differ in any layout.
"""

from typing import Any

import pytest

from tests.support.cases import case, config, flags
from tests.support.launch import run_cases

EMBEDDING = "embed.embedding (tied)"
# name of the case -> (DeepSpeed JSON, end of the tensor's name, bit)
FLIPS: dict[str, tuple[dict[str, Any], str, int]] = {
    "zero0": (config(0), "mlp.up.weight", 31),
    "zero0_optimizer": (config(0), "mlp.up.weight (exp_avg_sq)", 0),
    "zero1": (config(1, precision="bf16"), "mlp.up.weight", 15),
    "zero2": (config(2, precision="bf16"), "mlp.up.weight", 0),
    "zero3_persistent": (config(3, precision="bf16"), "norm1.weight", 3),
    "pipeline2_zero1_tied": (config(1, precision="bf16", stages=2, accumulation=4), EMBEDDING, 7),
}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    every_two = flags(corpus, layers=2, replica_check_interval=2)
    cases = [case(name, "flipped_bit", values, every_two, tensor=tensor, bit=bit)
             for name, (values, tensor, bit) in FLIPS.items()]
    return run_cases(cases, 2, tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found_and_named(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(f"{name}: step {result['step_ms']:.1f} ms, check {result['check_ms']:.2f} ms")
    first, second = result["checks"]
    assert first == second, "the ranks disagree"
    assert first[:3] == ["", "", ""]
    assert first[3].startswith(f"step 4: the copies of {result['name']} differ between rank 0 on "), first[3]
    assert "and rank 1 on" in first[3]
    assert result["events"] == [first[3].partition(". Nothing")[0]]
