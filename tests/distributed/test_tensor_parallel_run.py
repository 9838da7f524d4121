"""A run of train.py with two tensor-parallel ranks writes the rows of a run on one rank."""

import json
from pathlib import Path

import pytest

from tests.support.cases import config
from tests.support.launch import train_ranks
from tests.support.supervised import rows

RATES = ("param_norm", "update_ratio", "z_loss", "noise_scale", "grad_norm", "grad_norm_max", "clip_rate", "loss_max",
         "loss")  # sums and means over ranks and parameters
EQUAL = ("consumed_tokens", "global_batch_size", "lr", "skipped_steps")


@pytest.fixture(scope="module")
def runs(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, str]]:
    """Return {number of ranks: (run folder, output of rank 0)}."""
    folder, found = tmp_path_factory.mktemp("tensor_run"), {}
    for ranks in (1, 2):
        values = {**config(1, accumulation=2), "tensor_parallel": {"autotp_size": ranks}}
        path = folder / f"{ranks}.json"
        path.write_text(json.dumps(values))
        run = folder / f"run{ranks}"
        flags = [f"--deepspeed_config={path}", f"--save={run}", f"--train_data={corpus}", "--model=tiny",
                 "--model_overrides=vocab_size=256,n_layer=2,n_embd=64", "--seq_length=64", "--train_steps=4",
                 "--log_interval=1", "--z_loss=0.001", "--noise_scale_interval=1",
                 "--replica_check_interval=2", "--split=80,20,0"]
        done = train_ranks(ranks, flags, folder)
        assert [process.returncode for process in done] == [0] * ranks, done[0].stdout[-3000:]
        found[ranks] = (run, done[0].stdout)
    return found


def test_rows_are_those_of_one_rank(runs: dict[int, tuple[Path, str]]) -> None:
    one, two = (rows(runs[ranks][0]) for ranks in (1, 2))
    assert len(one) == len(two) == 4
    for expected, found in zip(one, two, strict=True):
        assert {key: found[key] for key in EQUAL} == {key: expected[key] for key in EQUAL}
        assert {key: found[key] for key in RATES} == pytest.approx({key: expected[key] for key in RATES}, rel=1e-3)
        # both ranks compute the tokens together, so that each has half of their FLOPs
        ratio = found["tflops_per_device"] / found["tokens_per_second"]
        assert ratio == pytest.approx(expected["tflops_per_device"] / expected["tokens_per_second"] / 2)


def test_the_degree_is_announced_and_recorded(runs: dict[int, tuple[Path, str]]) -> None:
    run, output = runs[2]
    assert "1 data-parallel, 2 tensor-parallel" in output
    layout = json.loads((run / "run.json").read_text())[-1]["layout"]
    assert (layout["world_size"], layout["data_parallel_size"], layout["tensor_parallel_size"]) == (2, 1, 2)
