"""Check the files of a shard against what was recorded when they were written."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.data.prepare.document_rows import row_type
from pretrain.data.prepare.partial_output import DOCUMENTS
from pretrain.data.prepare.shards import Shard, ShardRecord, record_path
from pretrain.data.prepare.summary import Statistics
from pretrain.data.token_files.hashes import DataHashes, hash_file, hashes_path, read_hashes
from pretrain.stored_json import reason_of


@dataclass(frozen=True)
class ShardFiles:
    """A complete shard. Its files have the sizes of their hashes, and all but the .bin have the right content."""

    prefix: str
    record: ShardRecord
    hashes: DataHashes

    @property
    def num_documents(self) -> int:
        return int(self.record.statistics["documents"])


def check_files(prefix: str, shard: Shard, record: ShardRecord) -> ShardFiles | str:
    """Return the shard, or why its files are not those that were written. The content of the .bin is checked later."""
    if record.shard != shard:
        return f"{record_path(prefix)} is of shard {record.shard}"
    try:
        hashes = read_hashes(hashes_path(prefix))
        if hashes is None or not hashes.is_complete:
            return f"{hashes_path(prefix)} is missing or not complete"
        row = row_type(has_signatures=record.facts.near is not None)
        num_bytes = int(record.statistics["documents"]) * row.itemsize
        for ending, size, sha256 in (("bin", hashes.bin_bytes, ""), ("idx", hashes.idx_bytes, hashes.idx_sha256),
                                     (DOCUMENTS, num_bytes, record.documents_sha256)):
            path = Path(f"{prefix}.{ending}")
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, and {size} were written"
            with path.open("rb") as file:
                if sha256 and hash_file(file.fileno(), after_chunk=lambda: None) != sha256:
                    return f"{path} is damaged: it has another SHA-256 than when it was written"
        Statistics.from_json(record.statistics)
    except OSError as error:
        return f"{error.filename} cannot be read: {reason_of(error)}"
    except (ValueError, TypeError, KeyError) as error:
        return f"a file of {prefix} is damaged: {error}"
    return ShardFiles(prefix, record, hashes)
