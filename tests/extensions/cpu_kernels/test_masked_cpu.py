"""Results that may not depend on the CPU: the same runs with instructions masked, and without a compiler.

ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY hide instructions from oneDNN and torch, and a wrapper of the compiler hides
them from the C functions. A mask above what this machine has changes nothing.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pretrain.extensions.cpu_kernels.choice import FAMILIES
from pretrain.extensions.cpu_kernels.library import has_library, library_folder
from tests.support.cases import case, flags
from tests.support.launch import ROOT, run_ranks, run_worker
from tests.support.layouts import dp2, fp16, pp2, relative_difference

COMPILER = shutil.which("cc") or "/nowhere/cc"
OLD_CPU = """#!{python}
import os, sys
words = ["-march=x86-64-v3" if word == "-march=native" else word for word in sys.argv[1:]]
os.execv("{compiler}", ["{compiler}", *words])
"""
WITHOUT_FP16 = "avx512_bf16"
NO_COMPILER = {"CC": "/nowhere/cc"}
MASKS: dict[str, dict[str, str]] = {
    "native": {},  # AMX and fp16 where the machine has them
    WITHOUT_FP16: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},  # an AMD EPYC: no fp16
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", **NO_COMPILER},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CC": "{folder}/old_cpu"},
}
RIGHT_IN_C = """
import json
from pretrain.extensions.cpu_kernels.choice import right_in_c
print(json.dumps(sorted(right_in_c())))
"""
STEPS, SAVED = 4, 2
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}}
# README.md, "The same losses in every layout"
WITHIN = {"fp32": 1e-6, "pipeline": 1e-6, "muon": 1e-6, "bf16": 5e-4, "fp16": 5e-4}


@pytest.fixture(scope="module")
def results(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of each mask by case; "evaluated", of two masks, is the report of tools/evaluate.py."""
    base, found = tmp_path_factory.mktemp("masked"), {}
    script = base / "old_cpu"
    script.write_text(OLD_CPU.format(python=sys.executable, compiler=COMPILER))
    script.chmod(0o755)
    common = flags(corpus, layers=2, hidden=128, steps=STEPS)
    for mask, variables in MASKS.items():
        environ = {key: value.replace("{folder}", str(base)) for key, value in variables.items()}
        if "old_cpu" in environ.get("CC", ""):  # its library and choice are of no use to later tests
            environ["TORCH_EXTENSIONS_DIR"] = str(built(base / "built"))
        run = base / "native" / "run-fp32"
        start = {key: value for key, value in common.items() if not key.startswith("model")} | {"init_from": str(run)}
        cases = [
            case("features", "features", {}, {}),
            case("fp32", "train_and_save", dp2(3), common, saved_step=SAVED),
            case("pipeline", "train_and_save", pp2(0), common, saved_step=SAVED),
            case("muon", "train_and_save", dp2(1) | MUON, common, saved_step=SAVED),
            case("bf16", "train_and_save", dp2(2, precision="bf16"), common, saved_step=SAVED),
            case("fp16", "start_from_weights", fp16(dp2(2)), {**start, "emulate_fp16": True}),
        ]
        found[mask] = run_worker("layout_worker.py", cases, 2, base / mask, environ=environ)
        found[mask]["right_in_c"] = json.loads(subprocess.run(
            [sys.executable, "-c", RIGHT_IN_C], cwd=ROOT, env={**os.environ, **environ}, capture_output=True,
            text=True, check=True).stdout.splitlines()[-1])
        if mask not in ("native", WITHOUT_FP16):
            continue
        words = [str(run), "--partition_weights", f"--data={corpus}", "--max_samples=200", "--json", "evaluated.json"]
        done = run_ranks([str(ROOT / "tools" / "evaluate.py"), *words], 2, cwd=base / mask, environ=environ)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
        found[mask]["evaluated"] = json.loads((base / mask / "evaluated.json").read_text())
    return found


def built(folder: Path) -> Path:
    """Return a new folder for compiled libraries, with DeepSpeed's operators."""
    folder.mkdir(parents=True)
    for operator in library_folder().glob("deepspeed_*"):
        (folder / operator.name).symlink_to(operator)
    return folder


@pytest.mark.parametrize("mask", MASKS)
def test_the_mask_has_an_effect(results: dict[str, dict[str, Any]], mask: str) -> None:
    """Our check and DeepSpeed's agree on fp16, and the C functions that exist are right.

    Linear layers are in C only where oneDNN has bf16: elsewhere one measurement of them took minutes (AVX2).
    """
    found = results[mask]["features"]
    assert found["fp16"] == found["fp16_of_deepspeed"]
    assert not (mask != "native" and found["fp16"])
    assert found["muon"] == ("torch.float16" if found["fp16"] else "torch.float32"), \
        "DeepSpeed's Muon no longer depends on the CPU: remove optimizers.orthogonalize_in_fp32"
    assert not (mask == "avx2" and found["bf16_in_onednn"])
    in_c = [name for name in FAMILIES if name in results[mask]["right_in_c"]]
    possible = [name for name in FAMILIES if name != "linear" or found["bf16_in_onednn"]]
    assert in_c == (possible if has_library() and MASKS[mask].get("CC") != NO_COMPILER["CC"] else [])


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "native"])
@pytest.mark.parametrize("name", WITHIN)
def test_losses_do_not_depend_on_the_cpu(results: dict[str, dict[str, Any]], mask: str, name: str) -> None:
    found, native = (losses(results[key][name]) for key in (mask, "native"))
    assert len(found) == STEPS
    assert relative_difference(found, native) <= WITHIN[name]


def losses(result: dict[str, Any]) -> list[float]:
    return result["loss"] if "loss" in result else [*result["before"]["loss"], *result["after"]["loss"]]


def test_an_fp32_run_is_evaluated_in_fp32(results: dict[str, dict[str, Any]]) -> None:
    """Also without fp16, where DeepSpeed alone would take bf16 for the partitions of the weights."""
    [row], [native] = (results[mask]["evaluated"]["data"] for mask in (WITHOUT_FP16, "native"))
    assert results[WITHOUT_FP16]["evaluated"]["partitioned_weights"]
    assert row["loss"] == pytest.approx(native["loss"], rel=1e-6)
    assert math.isfinite(row["loss"])
