"""A bit that flips in one copy of a parameter is found at the next check, which names the rank and the parameter.

tests/distributed/test_parity.py checks that copies never differ in any layout.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.monitor.read_run_folder import read_rows
from pretrain.resilience.run_lock import find_owner
from tests.support.cases import case, config, flags
from tests.support.launch import WORKERS, run_cases, run_ranks


def _tensor(stage: int, **settings: Any) -> dict[str, Any]:
    return {**config(stage, **settings), "tensor_parallel": {"autotp_size": 2}}


EMBEDDING = "embed.embedding (tied)"
# name of the case -> (DeepSpeed JSON, end of the tensor's name, bit)
FLIPS: dict[str, tuple[dict[str, Any], str, int]] = {
    "zero0": (config(0), "mlp.up.weight", 31),
    "zero0_optimizer": (config(0), "mlp.up.weight (exp_avg_sq)", 0),
    "zero1": (config(1, precision="bf16"), "mlp.up.weight", 15),
    "zero2": (config(2, precision="bf16"), "mlp.up.weight", 0),
    "zero3_persistent": (config(3, precision="bf16"), "norm1.weight", 3),
    "pipeline2_zero1_tied": (config(1, precision="bf16", stages=2, accumulation=4), EMBEDDING, 7),
    "tensor2_zero0_optimizer": (_tensor(0), "norm1.weight (exp_avg)", 4),
    "tensor2_zero1": (_tensor(1, precision="bf16"), "mlp.down.bias", 15),
    "tensor2_zero3": (_tensor(3, precision="bf16", param_persistence_threshold=0), "norm2.weight", 0),  # a partition
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


def test_a_run_with_a_flipped_bit_ends_before_it_saves(corpus: str, tmp_path: Path) -> None:
    """The bit flips before step 5; the checks at steps 3 and, for the save, 4 find nothing, and that at step 6 does."""
    run, values = tmp_path / "run", tmp_path / "zero0.json"
    values.write_text(json.dumps(config(0)))
    given = {**flags(corpus, layers=2, replica_check_interval=3), "save_interval": 4, "deepspeed_config": values,
             "save": run}
    (tmp_path / "faults.json").write_text('{"flip_bit_at": 5}')
    ranks = run_ranks([str(WORKERS / "faulty_train.py"), "faults.json",
                       *(f"--{key}={value}" for key, value in given.items())], 2, cwd=tmp_path)
    output = "".join(rank.stdout for rank in ranks)
    assert 1 in [rank.returncode for rank in ranks], output
    lines = [line for line in output.splitlines() if line.startswith("ds-pretrain: error")]
    assert len(lines) == 1, output
    assert "step 6: the copies of " in lines[0]
    assert "Traceback" not in output
    assert [row["step"] for row in read_rows(run / "events.jsonl") if row["event"] == "corruption"] == [6]
    assert [folder.name for folder in (run / "checkpoints").glob("global_step*")] == ["global_step4"]
    assert find_owner(run) is None
