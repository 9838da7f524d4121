"""The facts that identify a data set in the manifest of a checkpoint."""

from typing import Any

from pretrain.data.files.indexed import IndexedDataset


def file_record(indexed: IndexedDataset) -> dict[str, Any]:
    """Return hash, sizes and modification time.

    `sha256` covers every byte of the data; None: not known yet. In that case, size and modification time of the .bin
    identify it. Checkpoints of earlier versions have no `idx_bytes`.
    """
    status = indexed.file.status()
    return {"sha256": indexed.known_sha256(), "bin_bytes": status.st_size, "bin_mtime_ns": status.st_mtime_ns,
            "idx_bytes": indexed.index.num_bytes}
