"""Files that are shipped with the package: DeepSpeed JSONs (ds_configs/) and templates of scripts (launch/).

In a checkout they lie beside the package, in an installed package in pretrain/shipped_files/.
"""

import os
from pathlib import Path

from pretrain.errors import ConfigError, shorten

_PACKAGE = Path(__file__).resolve().parent
# name -> file in launch/
TEMPLATES = {
    "quickstart": "quickstart.yaml",
    "slurm": "slurm/pretrain.sbatch",
    "slurm-prepare": "slurm/prepare.sbatch",
    "hostfile": "hostfile",
    "mpi": "mpi.sh",
    "k8s-indexed-job": "k8s/indexed-job.yaml",
    "k8s-pytorchjob": "k8s/pytorchjob.yaml",
    "grafana": "grafana.json",
}


def shipped_folder(name: str) -> Path:
    """Return the folder `ds_configs` or `launch` of this checkout or of the installed package."""
    installed = _PACKAGE / "shipped_files" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def layout_names() -> list[str]:
    """Return the names of the DeepSpeed JSONs that `--deepspeed_config` accepts."""
    return sorted(path.stem for path in shipped_folder("ds_configs").glob("*.json"))


def find_layout(name: str, where: str = "--deepspeed_config") -> Path:
    """Return the path of the DeepSpeed JSON that a file name or the name of a shipped layout selects.

    Raises ConfigError for a word without slash and extension that is neither.
    """
    if Path(name).suffix or "/" in name or os.path.isfile(name):
        return Path(name)
    return shipped_layout(name, where, "file and no layout")


def shipped_layout(name: str, where: str = "config", what: str = "layout") -> Path:
    """Return the path of the DeepSpeed JSON of a layout. Raises ConfigError."""
    if name not in layout_names():
        raise ConfigError(where, problem=f"there is no {what} {shorten(name)!r}",
                          remedy="`ds-pretrain config` lists the layouts", word=name, known=layout_names())
    return shipped_folder("ds_configs") / f"{name}.json"


def find_template(name: str) -> Path:
    """Return the path of a template. Raises ConfigError."""
    if name not in TEMPLATES:
        raise ConfigError("template", problem=f"there is no template {shorten(name)!r}",
                          remedy=f"the templates are {', '.join(TEMPLATES)}", word=name, known=TEMPLATES)
    return shipped_folder("launch") / TEMPLATES[name]
