"""The choice between C kernels and torch's operators: compilers that are missing, old or wrong; the cached choice."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pretrain.distributed.device import cpu_features
from pretrain.extensions.cpu_kernels import choice, library, trials
from pretrain.extensions.cpu_kernels.c_functions import has_inner_product
from pretrain.extensions.cpu_kernels.choice import (
    ALL_IN_C,
    FAMILIES,
    KernelChoice,
    fastest_choice,
    in_c,
    measure_choice,
    parse_choice,
)
from pretrain.extensions.cpu_kernels.trials import TRIALS, Trial, is_right

ROOT = Path(__file__).resolve().parents[3]
REAL_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(REAL_COMPILER is None, reason="no C compiler")

# prints the families in C, and the largest error of GELU as the model computes it
REPORT = """
import json, torch
from pretrain.model.kernels.activation import activate
from pretrain.extensions.cpu_kernels.choice import right_in_c
x = torch.linspace(-4, 4, 1000).bfloat16()
error = (activate("gelu_tanh", x).float() - torch.nn.functional.gelu(x.float(), approximate="tanh")).abs().max()
print(json.dumps({"in_c": sorted(right_in_c()), "error": float(error)}))
"""
# compiles copies of the sources in which each 1.0f is 1.5f
WRONG = """#!{python}
import shutil, subprocess, sys, tempfile
from pathlib import Path
with tempfile.TemporaryDirectory() as folder:
    words = []
    for word in sys.argv[1:]:
        if word.endswith(".c"):
            for path in (Path(word), *Path(word).parent.glob("*.h")):
                Path(folder, path.name).write_text(path.read_text().replace("1.0f", "1.5f"))
            word = str(Path(folder, Path(word).name))
        words.append(word)
    sys.exit(subprocess.run(["{compiler}", *words]).returncode)
"""
# rejects flags that were added to gcc after 2015, and records the flags that it accepts
OLD = """#!{python}
import subprocess, sys
if any(word in ("-march=native", "-mcpu=native", "-mavx512bf16") or "prefer" in word for word in sys.argv):
    sys.exit("unrecognized command line option")
open("{log}", "w").write(" ".join(sys.argv))
sys.exit(subprocess.run(["{compiler}", *sys.argv[1:]]).returncode)
"""


def report(folder: Path, **environ: str) -> tuple[dict[str, object], str]:
    """Run REPORT in a new process with its own folder of libraries. Return the printed object, and the error output."""
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_EXTENSIONS_DIR": str(folder / "built"),
                               **environ})
    return json.loads(done.stdout), done.stderr


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable, compiler=REAL_COMPILER, log=path.with_suffix(".log")))
    path.chmod(0o755)
    return path


def test_a_library_with_wrong_results_is_not_used(tmp_path: Path) -> None:
    found, output = report(tmp_path, CC=str(script(tmp_path / "wrong_cc", WRONG)))
    assert "activation" not in found["in_c"]
    assert found["error"] < 0.02
    [line] = output.splitlines()
    assert line.startswith("warning: the C kernels for activation")
    assert len(list((tmp_path / "built").glob("*.so"))) == 1  # it was compiled


def test_an_old_gcc_without_cc_gets_the_flags_that_it_knows(tmp_path: Path) -> None:
    script(tmp_path / "bin" / "gcc", OLD)
    for tool in ("as", "ld"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or "")
    found, output = report(tmp_path, PATH=str(tmp_path / "bin"), CC="")
    assert output == ""
    assert found["in_c"] == sorted(family for family in FAMILIES if family != "linear" or has_inner_product())
    flags = (tmp_path / "bin" / "gcc.log").read_text().split()
    assert "-fopenmp" in flags
    assert ("-mavx2" in flags) == ("avx2" in cpu_features().split())


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", "'"])
def test_without_a_working_compiler_there_is_no_library(compiler: str, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert library._library.__wrapped__() is None
    monkeypatch.setattr(library, "_library", lambda: None)
    assert choice.right_in_c.__wrapped__() == frozenset()


def test_a_damaged_library_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / library.library_name()).touch()
    loaded = library._library.__wrapped__()
    assert loaded is not None
    assert hasattr(loaded, "cross_entropy")


def test_without_a_home_folder_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run as a user that its /etc/passwd lacks."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    assert library._library.__wrapped__() is None


def test_every_trial_is_right_and_the_random_state_is_kept() -> None:
    state = torch.random.get_rng_state()
    assert [trial.family for trial in TRIALS if not is_right(trial)] == []
    assert {trial.family for trial in TRIALS} <= set(FAMILIES)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_faster_variant_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with several trials is chosen by the sum of their times."""
    times = {"activation": (1.0, 2.0), "norm": (2.0, 1.0), "loss": (1.0, 0.95)}
    trials = [trial for family in times for trial in (_trial(family), _trial(family))]
    monkeypatch.setattr(choice, "TRIALS", trials)
    monkeypatch.setattr(choice, "times_ms", lambda trial: times[trial.family])
    chosen, measured = measure_choice(ALL_IN_C - {"attention"})
    assert chosen == ALL_IN_C - {"norm", "attention"}  # 5% is within the error of the measurement
    assert measured == {family: (2 * in_c, 2 * in_torch) for family, (in_c, in_torch) in times.items()}


def test_times_are_the_shortest_cpu_times_of_this_thread_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is that of the thread, so that waiting counts nothing. The numbers of repetitions are limited."""
    clock, calls, variants = [0.0], [], {"c": (0.004, 0.9, 0.001), "torch": (0.5, 0.002, 0.9)}
    monkeypatch.setattr(trials.time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(trials.time, "perf_counter", lambda: pytest.fail("wall-clock time depends on other programs"))

    def variant(name: str, seconds: tuple[float, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
        def compute(x: torch.Tensor) -> torch.Tensor:
            clock[0] += seconds[len(calls) // 2 % len(seconds)]
            calls.append(name)
            return x
        return compute

    trial = Trial("norm", lambda rows, generator: (torch.zeros(rows),),
                  *(variant(name, seconds) for name, seconds in variants.items()))
    assert trials.times_ms(trial) == pytest.approx((1.0, 2.0))
    assert calls == ["c", "torch"] * 6  # after so much time, the least number
    calls.clear()
    variants.update({"c": (1e-6,), "torch": (1e-6,)})
    quick = Trial("norm", trial.operands, *(variant(name, seconds) for name, seconds in variants.items()))
    trials.times_ms(quick)
    assert calls == ["c", "torch"] * 26


def _trial(family: str) -> object:
    return type("Trial", (), {"family": family})()


def test_the_choice_is_measured_once_per_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    measured = []
    results = [ALL_IN_C - {"activation"}, ALL_IN_C - {"loss"}]

    def measure(possible: KernelChoice) -> tuple[KernelChoice, dict[str, tuple[float, float]]]:
        measured.append(possible)
        if len(measured) == 3:  # another process has measured at the same time
            choice._write(next(tmp_path.glob("*.json")), results[0], {})
            return results[1], {}
        return results[len(measured) - 1], {}

    monkeypatch.setattr(choice, "measure_choice", measure)
    assert [fastest_choice(), fastest_choice()] == results[:1] * 2
    [path] = tmp_path.glob("ds_pretrain_choice_*.json")
    assert path.stat().st_mode & 0o444 == 0o444  # other users of the folder read it
    assert parse_choice(json.loads(path.read_text())["in_c"]) == results[0]
    path.write_text("damaged")
    assert [fastest_choice(), fastest_choice()] == results[1:] * 2
    assert len(measured) == 2
    path.write_text("damaged")
    assert fastest_choice() == results[0]
    # a family whose results are wrong now is not in C, whatever the file says
    monkeypatch.setattr(choice, "right_in_c", lambda: frozenset())
    assert fastest_choice() == frozenset()


def test_the_choice_decides() -> None:
    x = torch.zeros(4).bfloat16()
    try:
        for value in (True, False):
            choice.set_choice(ALL_IN_C if value else ALL_IN_C - {"activation"})
            assert in_c("activation", x, torch.bfloat16) is value
            assert in_c("norm", x, torch.bfloat16)
    finally:
        choice.set_choice(None)
    assert not in_c("activation", x.float(), torch.bfloat16)
    assert in_c("activation", x.float(), torch.float32)
