"""tools/bench.py for real, on a model of a few thousand parameters: what it compares, never how fast it is."""

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.bench.levers import LEVERS, explain
from pretrain.bench.processes.baseline_job import Workshop
from pretrain.bench.processes.interleave import take_turns
from pretrain.bench.report import check_markers, markers, write_between_markers
from pretrain.bench.sections.pipeline import highest_speedup
from pretrain.bench.sections.step import PEERS, PROJECT
from pretrain.bench.settings import PRESETS, Settings, add_flags, settings_of
from pretrain.cli import Parser
from pretrain.config.arguments import RunArguments
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--preset", "cpu-small", "--device", "cpu", "--rounds", "2"]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, str(ROOT / "tools" / "bench.py"), *words], capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": path})


def test_contenders_do_the_same_work() -> None:
    done = bench(*SMALL, "--json")
    report = json.loads(done.stdout)
    step, expected = report["sections"]["step"], {PROJECT, *PEERS}
    if importlib.util.find_spec("accelerate") is None:
        expected.remove("transformers.Trainer")
        assert report["failures"] == [line for line in report["failures"] if ".[bench]" in line], done.stderr
    else:
        assert (report["failures"], done.returncode) == ([], 0), done.stderr
    assert set(step["contenders"]) == expected
    assert step["same_work"]
    assert step["matmul_tflops"] > 0
    ours = step["contenders"][PROJECT]
    for name, values in step["contenders"].items():
        first, second = values["losses"][:2]
        assert first == pytest.approx(ours["losses"][0], rel=1e-3), name
        assert second == pytest.approx(ours["losses"][1], rel=2e-3), name  # after an update: the same optimizer
        assert second < first
        assert len(values["losses"]) == 2 + 2 * 2  # warm-up, rounds x steps
        assert values["parameters"] == ours["parameters"]
        assert len(values["rounds"]) == 2
        assert values["tokens_per_second"] == statistics.median(values["rounds"])
        assert values["speed_ratio"] == pytest.approx(ours["tokens_per_second"] / values["tokens_per_second"])
        assert values["memory_ratio"] == pytest.approx(ours["peak_memory_bytes"] / values["peak_memory_bytes"])
        assert values["mfu"] == pytest.approx(
            values["tokens_per_second"] * step["flops_per_token"] / step["matmul_tflops"] / 1e12)
        assert values["mfu"] > 0
        assert 0 < values["peak_memory_bytes"] < values["resident_bytes"]


def test_a_contender_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    settings = Settings(what=("step",), preset_name="cpu-small", preset=PRESETS["cpu-small"], device=cpu_device(),
                        precision="bf16", rounds=2, timeout_s=900, ranks=(1,), nvme_path=None)
    workshop = Workshop(settings, tmp_path)
    turns = take_turns([[workshop.job("fails", "products", product_size=-1)],
                        [workshop.job("works", "products", product_size=64)]], workshop, lambda text: None)
    (line,) = turns.failures
    assert line.startswith("fails: RuntimeError")
    assert len(turns.answers["works"]) == 2
    assert "fails" not in turns.answers


@pytest.mark.parametrize(("words", "told"), [
    (["--what", "steps"], 'did you mean "step"?'),
    (["--preset", "cpu-smal"], 'did you mean "cpu-small"?'),
    (["--rounds", "0"], "--rounds: found '0'"),
    (["--ranks", "2,3"], "--ranks"),
    (["--nvme_path", "/nowhere"], "--nvme_path"),
    (["--what", "step,offload"], "--nvme_path: found nothing"),
    (["--lr_warmup_stepz", "3"], "lr_warmup_steps"),
    (["--device", "cuda"], "no GPU"),
])
def test_bad_input_is_one_line(words: list[str], told: str) -> None:
    parser = Parser()
    add_flags(parser)
    with pytest.raises(ConfigError) as error:
        settings_of(*parser.parse_known_args([*SMALL, *words]), gpus=0)
    assert told in str(error.value)


def test_refused_before_anything_is_measured() -> None:
    done = bench(*SMALL, "--write", "/nowhere/README.md")
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")
    assert "--write" in done.stderr


def test_figures_stand_between_two_markers(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("\n".join(["before", *markers("cpu"), "after"]))
    for text in ("| old |", "| new |"):
        check_markers(path, "cpu")
        write_between_markers(path, "cpu", text)
    assert path.read_text().splitlines() == ["before", markers("cpu")[0], "| new |", markers("cpu")[1], "after"]
    with pytest.raises(ConfigError, match="bench h200-llama-1b: begin"):
        check_markers(path, "h200-llama-1b")
    check_markers(ROOT / "tools" / "performance.md", "cpu")


def test_the_bound_of_1f1b() -> None:
    """(p - 1) / (m + p - 1) of the time is lost when the stages are alike; more when they are not."""
    assert highest_speedup([1.0, 1.0], 8) == pytest.approx(2 * (1 - 1 / 9))
    assert highest_speedup([1.0] * 4, 16) == pytest.approx(4 * (1 - 3 / 19))
    assert highest_speedup([1.0, 2.0], 8) == pytest.approx(8 * 3 / (3 + 7 * 2))


@pytest.mark.skipif(not os.environ.get("DS_PRETRAIN_ALL_BENCH"), reason="2 minutes; DS_PRETRAIN_ALL_BENCH=1")
def test_everything_that_can_be_measured(tmp_path: Path) -> None:
    done = bench(*SMALL, "--what", "overhead,pipeline,checkpoint,startup,scaling,offload", "--nvme_path", str(tmp_path),
                 "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["sections"]
    assert found["overhead"]["overhead"] > -0.9
    assert found["pipeline"]["of_bound"] == pytest.approx(found["pipeline"]["speedup"] / (16 / 9))
    assert sum(found["pipeline"]["stage_flops"]) > 0
    assert all(values["blocking_s"] > 0 for key, values in found["checkpoint"].items() if key != "checkpoint_bytes")
    assert len(found["startup"]["seconds"]) == 2
    assert found["scaling"]["efficiency"]["1"] == 1
    assert set(found["offload"]["aio"]) >= {"block_size", "queue_depth", "intra_op_parallelism"}
    assert not list(tmp_path.iterdir())


def test_levers_are_where_they_are_said_to_be() -> None:
    """Files that a lever names exist, flags are train.py's."""
    text = explain()
    files = [path.as_posix() for folder in ("pretrain", "launch") for path in (ROOT / folder).rglob("*")]
    for lever in LEVERS:
        assert lever.name in text
        for name in re.findall(r"[\w/]+\.(?:py|c|sh)\b", lever.home):
            assert any(file.endswith(f"/{name}") for file in files), name
        for flag in re.findall(r"--(\w+)", f"{lever.home} {lever.when}"):
            assert flag in {*RunArguments.__dataclass_fields__, "what", "nvme_path"}, flag
