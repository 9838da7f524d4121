"""Build the wheel, and install it into a new environment that has the packages of this one, but not the checkout."""

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from tests.support.launch import LIMIT_S

SHIPPED = "pretrain/shipped_files"


def build_wheel(source: Path, out: Path) -> Path:
    """Build the sdist of a checkout, and from the sdist the wheel, in a new folder. Returns the path of the wheel."""
    _hatchling(source, "sdist", out)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        # Python before 3.10.12 and 3.11.4, such as Debian 12's, has no filters
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(out / "source")
    (unpacked,) = (out / "source").iterdir()
    _hatchling(unpacked, "wheel", out)
    (wheel,) = out.glob("*.whl")
    return wheel


def _hatchling(source: Path, target: str, out: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)],
                   cwd=source, check=True, capture_output=True, timeout=LIMIT_S)


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment, and return the environment's folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))  # without its .pth files: one is the checkout's
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=LIMIT_S)
    script = (Path(sys.executable).parent / "deepspeed").read_text().partition("\n")[2]
    (folder / "bin" / "deepspeed").write_text(f"#!{python}\n{script}")
    (folder / "bin" / "deepspeed").chmod(0o755)
    return folder
