"""The choice between C kernels and torch's operators in real runs: the same on all ranks, and after every resume."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrain.extensions.cpu_kernels.choice import FAMILIES
from pretrain.extensions.cpu_kernels.library import has_library, library_folder
from pretrain.monitor.read_run_folder import read_metrics, read_starts
from tests.support.cases import config, flags
from tests.support.launch import run_ranks, train_ranks

pytestmark = pytest.mark.skipif(not has_library(), reason="no C compiler")
NONE = dict.fromkeys(FAMILIES, False)


def test_a_family_that_one_rank_lacks_is_in_torch_on_all_ranks(tmp_path: Path) -> None:
    done = run_ranks([str(Path(__file__).parent / "workers" / "choice_worker.py")], 2, cwd=tmp_path)
    assert [process.returncode for process in done] == [0, 0], done[0].stdout
    assert [json.loads((tmp_path / f"choice.{rank}.json").read_text()) for rank in range(2)] == [NONE, NONE]


@pytest.fixture
def run(corpus: str, tmp_path: Path) -> Callable[..., tuple[dict[int, float], str]]:
    """Return a function that starts a run of 4 steps. It returns the losses by step, and the output."""
    built = tmp_path / "built"
    built.mkdir()
    for operator in library_folder().glob("deepspeed_*"):  # do not compile them again
        (built / operator.name).symlink_to(operator)
    values = config(1, precision="bf16", accumulation=1)
    (tmp_path / "ds.json").write_text(json.dumps(values))
    common = flags(corpus, layers=2, overrides="activation_function=gelu_new", steps=4, log_interval=1,
                   deepspeed_config=tmp_path / "ds.json")

    def start(name: str, compiler: str = "", **others: int) -> tuple[dict[int, float], str]:
        words = {**common, "save": tmp_path / name, **others}
        [done] = train_ranks(1, [f"--{key}={value}" for key, value in words.items()], tmp_path,
                             TORCH_EXTENSIONS_DIR=str(built), **({"CC": compiler} if compiler else {}))
        assert done.returncode == 0, done.stdout
        return {row["step"]: row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row}, done.stdout

    return start


def test_a_resume_uses_the_recorded_choice(run: Callable[..., tuple[dict[int, float], str]], tmp_path: Path) -> None:
    complete, _ = run("complete")
    run("resumed", exit_step=2)
    [cached] = (tmp_path / "built").glob("ds_pretrain_choice_*.json")
    recorded = read_starts(tmp_path / "complete")[0]["cpu_kernels"]
    assert recorded == json.loads(cached.read_text())["in_c"]
    assert recorded["activation"]
    # the cache is lost, and another measurement gives another result
    cached.write_text(json.dumps({"in_c": NONE}))
    resumed, _ = run("resumed", exit_step=3)
    assert resumed == {step: complete[step] for step in (1, 2, 3)}
    assert read_starts(tmp_path / "resumed")[1]["cpu_kernels"] == recorded
    # the choice has an effect: a new run uses torch's operators
    other, _ = run("other")
    assert other != complete
    assert read_starts(tmp_path / "other")[0]["cpu_kernels"] == NONE
    # on a machine without a compiler the run continues with torch's operators, and reports it
    resumed, output = run("resumed", compiler="/nowhere/cc")
    assert set(resumed) == {1, 2, 3, 4}
    [line] = [line for line in output.splitlines() if "C kernels" in line]
    assert line.startswith("warning: the C kernels for activation")
    assert read_starts(tmp_path / "resumed")[2]["cpu_kernels"] == NONE


def test_deterministic_runs_measure_nothing(run: Callable[..., tuple[dict[int, float], str]], tmp_path: Path) -> None:
    """Their choice depends neither on the cache nor on times, and a resume in the other mode is named."""
    run("usual")
    [cached] = (tmp_path / "built").glob("ds_pretrain_choice_*.json")
    first, _ = run("first", deterministic="true")
    cached.write_text(json.dumps({"in_c": NONE}))
    run("second", deterministic="true", exit_step=2)
    second, output = run("second", deterministic="true")
    assert second == first
    assert read_starts(tmp_path / "second")[0]["flags"]["deterministic"] is True
    assert "--deterministic was" not in output
    _, output = run("second", train_steps=6)
    assert "warning: --deterministic was True at the run's last start, and is not given now; the next losses" in output
    third, _ = run("third")
    assert third != first
