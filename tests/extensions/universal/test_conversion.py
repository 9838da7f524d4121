"""Conversions to the universal format: plain DeepSpeed loads them in any layout."""

import os
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.convert.diff import diff
from pretrain.checkpoint.format.run_checkpoints import read_manifest
from pretrain.errors import ConfigError
from pretrain.extensions.universal import write_universal
from pretrain.extensions.universal.write_universal import convert
from tests.checkpoint.test_export import SOURCES, saved, work
from tests.checkpoint.test_tool import in_a_fork
from tests.support.cases import case, config, flags
from tests.support.checkpoints import real_run
from tests.support.layouts import SAVED, STEPS, dp2, fp16, pp2, relative_difference, run_layouts
from tests.support.own_memory import MemoryWatch

__all__ = ["saved", "work"]  # fixtures
# DeepSpeed's own conversion rejects these changes: from ZeRO-0 to any layout, 1 to 3, 3 to 1, and ZeRO-3 to pipeline
UNIVERSAL = {"stage0-zero1": dp2(1), "stage0-zero3": dp2(3), "zero3-pipeline2": pp2(1), "zero3-zero2": dp2(2),
             "bf16-zero3": dp2(3, precision="bf16"), "fp16-zero2": fp16(dp2(2))}
WITHIN = {"bf16": 5e-3, "fp16": 2e-3}


def test_plain_deepspeed_loads_universal_checkpoints(corpus: str, work: Path, saved: dict[str, Any]) -> None:
    for name in SOURCES:
        convert(Path(saved[name]["folder"]), work / "universal" / name)
    assert (work / "universal/latest_universal").read_text() in SOURCES
    loaded = run_layouts({name: (2, case(name, "load_universal", values,
                                         flags(corpus, steps=STEPS, emulate_fp16="fp16" in values), saved_step=SAVED,
                                         source=str(work / "universal" / name.split("-")[0])))
                          for name, values in UNIVERSAL.items()}, work / "loaded")
    for name, after in loaded.items():
        before = saved[name.split("-")[0]]
        assert diff(Path(before["folder"]), Path(after["folder"])) == [], name
        distance = relative_difference(after["after"]["loss"], before["after"]["loss"])
        print(f"universal {name}: no difference, losses within {distance:.1e}")
        assert distance <= WITHIN.get(name.split("-")[0], 1e-5), name
        assert after["after"]["lr"] == before["after"]["lr"], name
        assert after["after"]["loss_scale"] == before["after"]["loss_scale"], name
        assert after["counters"] == [STEPS, 0], name


def test_conversion_is_atomic_and_skips_an_equal_result(work: Path, saved: dict[str, Any],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = Path(saved["zero3"]["folder"]), work / "once"
    with monkeypatch.context() as patch:
        patch.setattr(write_universal, "_universal_optimizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, out)
    assert not out.exists()
    assert not list(work.glob(".tmp-*"))
    convert(source, out)
    written = (out / "source.json").stat().st_mtime_ns
    convert(source, out)
    assert (out / "source.json").stat().st_mtime_ns == written, "converted again"
    with pytest.raises(ConfigError, match="the folder exists and is not the output of this conversion"):
        convert(Path(saved["stage0"]["folder"]), out)
    os.truncate(next(out.glob("zero/*/fp32.pt")), 100)
    with pytest.raises(ConfigError, match="the folder exists and is not the output of this conversion"):
        convert(source, out)


def test_memory_is_at_most_twice_the_largest_file(corpus: str, tmp_path: Path) -> None:
    wide, values = flags(corpus, hidden=512, layers=5, steps=1, seq_length=8), config(1, micro=1, accumulation=1)
    folder = Path(run_layouts({"wide": (2, case("wide", "train_and_save", values, wide, saved_step=1))},
                              tmp_path / "wide")["wide"]["folder"])
    with MemoryWatch() as watch:
        convert(folder, tmp_path / "universal")
    assert watch.peak - watch.before <= 2 * max(record.bytes for record in read_manifest(folder).files.values())


def test_the_subcommand(corpus: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    converted = in_a_fork(tmp_path, "convert", real_run("zero1", corpus, tmp_path_factory), tmp_path / "universal")
    assert converted.returncode == 0, converted.stdout
    assert converted.stdout.splitlines()[-1].startswith(f"{tmp_path}/universal: ")
    assert list((tmp_path / "universal").rglob("exp_avg.pt"))
