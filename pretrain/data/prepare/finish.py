"""Turn a complete partial output into OUT.bin, .idx, .meta.json, .sha256.json and .summary.json.

All files are completed in OUT.partial/ first. Then the state says so, and they are renamed. If this process is killed
in between, the next start renames the rest.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pretrain.data.files.hashes import DataHashes
from pretrain.data.files.write_index import write_index
from pretrain.data.prepare.partial_output import PartialOutput
from pretrain.sync import fsync, write_synced

OUTPUTS = {"tokens": ".bin", "sha256.json": ".sha256.json", "meta.json": ".meta.json", "summary.json": ".summary.json",
           "index": ".idx"}
"""name in OUT.partial/ -> ending of the final name, in the order of renaming: without .idx, no reader accepts the rest
"""


def existing_outputs(out: str) -> list[str]:
    """Return the names of the files that a preparation would replace."""
    return [f"{out}{ending}" for ending in OUTPUTS.values() if Path(f"{out}{ending}").exists()]


def write_files(output: PartialOutput, dtype: npt.DTypeLike, *, blocks: tuple[str, ...], meta: Mapping[str, Any],
                summary: Mapping[str, Any]) -> None:
    """Write the files next to the tokens. Raises OSError."""
    os.fsync(output.files["tokens"].descriptor)
    idx_sha256 = write_index(output.path / "index", dtype, output.path / "lengths")
    status, idx_status = os.fstat(output.files["tokens"].descriptor), (output.path / "index").stat()
    hashes = DataHashes(status.st_size, status.st_mtime_ns, idx_sha256, blocks, idx_status.st_size,
                        idx_status.st_mtime_ns)
    write_synced(output.path / "sha256.json", hashes.to_json().encode())
    write_synced(output.path / "meta.json", json.dumps(dict(meta), indent=1).encode() + b"\n")
    write_synced(output.path / "summary.json", json.dumps(dict(summary), indent=1, ensure_ascii=False).encode("utf-8",
                 "backslashreplace") + b"\n")


def rename_files(output: PartialOutput, out: str) -> None:
    """Rename all files that have not been renamed, and delete the folder. Raises OSError."""
    if (output.path / "tokens").exists():
        for ending in (".idx", ".meta.json"):
            Path(f"{out}{ending}").unlink(missing_ok=True)
    for name, ending in OUTPUTS.items():
        if (output.path / name).exists():
            os.replace(output.path / name, f"{out}{ending}")
    fsync(output.path.parent)
    output.delete()
