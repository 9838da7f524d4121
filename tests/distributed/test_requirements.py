"""The lowest versions of the packages that ds-pretrain requires, and the errors about older ones."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from pretrain.distributed.requirements import TESTED, check_requirements, requirements
from pretrain.errors import ConfigError
from tests.support.launch import ROOT


def test_lowest_versions_are_those_of_the_requirements() -> None:
    """launch/constraints-lowest.txt pins each requirement to its lowest version, and DeepSpeed to the lowest tested."""
    text = (ROOT / "launch/constraints-lowest.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = {name: Version(pin) for name, pin in (line.split("==") for line in lines)}
    required = {each.name: each.specifier for each in requirements()}
    extras = re.findall(r'"([\w-]+>=[\d.]+)', (ROOT / "pyproject.toml").read_text())
    bounds = {**{each.name: each.specifier for each in map(Requirement, extras) if each.name in pins}, **required}
    assert pins.keys() == bounds.keys()
    lowest = {name: Version(next(each.version for each in bound if each.operator == ">="))
              for name, bound in bounds.items()}
    # a release that exists: 1.11.1 for ninja>=1.11
    assert {name: Version(".".join(map(str, pin.release[:len(lowest[name].release)]))) for name, pin in pins.items()
            if name != "deepspeed"} == {name: pin for name, pin in lowest.items() if name != "deepspeed"}
    assert str(pins["deepspeed"]) == TESTED[0]


@pytest.mark.parametrize(("package", "version", "lowest"), [
    ("torch", "2.5.1", "2.6"), ("transformers", "4.57.6", "5.1"), ("numpy", "1.24.4", "1.26")])
def test_an_older_package_is_rejected_in_one_line(package: str, version: str, lowest: str, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    check_requirements()
    check_requirements.cache_clear()
    installed_as(tmp_path, package, version)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^{package}: found version {version}; expected at least {lowest}\. pip "):
        check_requirements()
    with pytest.MonkeyPatch.context() as later:
        later.syspath_prepend(str(installed_as(tmp_path / "image", package, f"{lowest}.0a0+1234.nv24.12")))
        check_requirements()


def installed_as(folder: Path, package: str, version: str) -> Path:
    """Write the record of an installed package into `folder`."""
    record = folder / f"{package}-{version}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return folder


def test_a_run_with_an_older_package_ends_before_torch_is_imported(tmp_path: Path) -> None:
    installed_as(tmp_path, "torch", "2.5.1")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    command = [sys.executable, "-m", "pretrain", "check", "--deepspeed_config", "zero2_bf16", "--model", "gpt2",
               "--train_data", "none", "--train_steps", "1", "--save", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "torch: found version 2.5.1; expected at least 2.6. pip install" in done.stderr
