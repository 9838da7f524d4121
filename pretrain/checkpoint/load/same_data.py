"""Compare the data and the tokenizer of a run with those of the checkpoint that it resumes from."""

import contextlib
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import Manifest, tokenizer_fingerprint
from pretrain.checkpoint.save.rollbacks import position_after
from pretrain.config.validate import Plan
from pretrain.data.files.identity import FoundHashes, check_blocks, find_hashes, hash_if_fast
from pretrain.data.files.indexed import IndexedDataset
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import newest_start, read_rows

HASHED_EVENT = "data_hashed"  # row of events.jsonl with the fields of `SampleDataset.record`
OTHER_BYTES = "unknown"  # its `sha256` if the data was changed before all of it was hashed
_FAST_S = 2.0  # data that is hashed within this time is hashed at the start
_SHOWN = 12  # digits of a hash in a message


def stored_hashes(plan: Plan, indexed: IndexedDataset) -> FoundHashes:
    """Read the hashes of a data set: next to it, or in the run folder if the folder of the data is read-only."""
    return find_hashes(indexed, fallback_path(plan, indexed))


def fallback_path(plan: Plan, indexed: IndexedDataset) -> Path:
    """Return the path of the hashes in the run folder."""
    name = next(name for name, dataset in plan.datasets.items() if indexed in dataset.sources)
    return Path(plan.args.save) / f"{name}_data.sha256.json"


def check_sampled_blocks(plan: Plan) -> list[str]:
    """Compare randomly chosen blocks of each data set with its stored hashes. Raises ConfigError if one differs.

    Returns notes about stored hashes that cannot be used.
    """
    notes: list[str] = []
    for indexed in {id(indexed): indexed for dataset in plan.datasets.values() for indexed in dataset.sources}.values():
        found = stored_hashes(plan, indexed)
        notes += (*indexed.notes, *found.notes)
        check_blocks(indexed, found)
        if found.current is not None and found.current.is_complete:
            indexed.hashes = found.current
    return notes


def check_same_data(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Compare the training data with that of the checkpoint.

    Returns a note if it differs and --allow_other_data accepts this, else "". Raises ConfigError for other data. Large
    data that has no hash yet is compared by samples; `resilience.data_watch` hashes and compares it during training.
    """
    problem = _difference(manifest, plan, folder)
    if not problem:
        return ""
    if plan.args.allow_other_data:
        return f"{plan.data.train_flag}: {problem}; --allow_other_data: training continues at sample " \
               f"{position_after(folder.parent, manifest):,} of this data"
    raise ConfigError(plan.data.train_flag, problem=problem,
                      remedy="give the data of the checkpoint, or continue with this data by --allow_other_data")


def _difference(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Return how the training data differs from that of the checkpoint; "": it does not, as far as is known."""
    dataset = plan.datasets["train"]
    expected = expected_sha256(manifest, plan)
    if expected is not None and dataset.sources[0].hashes is None:
        hash_if_fast(dataset.sources[0], _FAST_S)
    record, saved = dataset.record(), manifest.data or {}
    if expected is None or record["sha256"] is None:
        if _has_fingerprint(dataset, manifest.data_fingerprint):
            return ""
        if saved.get("bin_bytes") not in (None, record["bin_bytes"]):
            return _other_content(folder, f"{saved['bin_bytes']:,} bytes", f"{record['bin_bytes']:,} bytes")
        return _other_content(folder, f"fingerprint {manifest.data_fingerprint[:_SHOWN]}",
                              f"fingerprint {dataset.fingerprint[:_SHOWN]}")
    if expected != record["sha256"]:
        return _other_content(folder, f"SHA-256 {expected[:_SHOWN]}", f"SHA-256 {record['sha256'][:_SHOWN]}")
    if _has_fingerprint(dataset, manifest.data_fingerprint):
        return ""
    ranges = [f"{values.get('first_token'):,} to {values.get('last_token'):,}" for values in (saved, record)]
    return f"{folder.name} was trained on tokens {ranges[0]} of this data, and this run would train on tokens " \
           f"{ranges[1]}: --split or the validation data is another one"


def _has_fingerprint(dataset: SampleDataset, recorded: str) -> bool:
    """Return whether a checkpoint recorded this fingerprint. Earlier versions hashed the whole index of large data."""
    return dataset.fingerprint == recorded or \
        (isinstance(dataset, ShuffledWindows) and dataset.earlier_fingerprint() == recorded)


def _other_content(folder: Path, saved: str, current: str) -> str:
    return f"this is not the data that {folder} was trained on ({saved} there, {current} here)"


def expected_sha256(manifest: Manifest, plan: Plan) -> str | None:
    """Return the hash of all data that the checkpoint was trained on; None if it is not known.

    A checkpoint that was saved before its data was hashed has no hash. Then an event of the run, or stored hashes, may
    have the hash of the data with this size and modification time.
    """
    saved = manifest.data
    if saved is None or saved.get("sha256") is not None:
        return saved["sha256"] if saved else None
    key = (saved.get("bin_bytes"), saved.get("bin_mtime_ns"))
    for row in read_rows(Path(plan.args.save) / "events.jsonl"):
        if row.get("event") == HASHED_EVENT and (row.get("bin_bytes"), row.get("bin_mtime_ns")) == key:
            return _text(row.get("sha256"))
    found = stored_hashes(plan, plan.datasets["train"].sources[0])
    for hashes in (found.current, found.earlier):
        if hashes is not None and hashes.is_complete and (hashes.bin_bytes, hashes.bin_mtime_ns) == key:
            return hashes.sha256
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def check_same_tokenizer(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Compare the tokenizer with that of the checkpoint.

    Returns a note if it differs and --allow_other_data accepts this, or if only one of them has a tokenizer, else "".
    Raises ConfigError for another tokenizer: the same token ids would mean other text.
    """
    saved, current = manifest.tokenizer_fingerprint, tokenizer_fingerprint(plan)
    if saved == current:
        return ""
    if saved is None or current is None:
        return f"{folder.name} was saved {'without' if saved is None else 'with'} --tokenizer"
    problem = f"this is not the tokenizer of {folder} (SHA-256 {saved[:_SHOWN]} there, {current[:_SHOWN]} here)"
    if plan.args.allow_other_data:
        return f"--tokenizer {plan.args.tokenizer}: {problem}"
    raise ConfigError(f"--tokenizer {plan.args.tokenizer}", problem=problem,
                      remedy="give the tokenizer of the checkpoint, or continue with this one by --allow_other_data")


def evaluation_data_notes(plan: Plan) -> list[str]:
    """Return a note for each of validation and test data that is not that of the run's last start."""
    recorded: Any = None
    with contextlib.suppress(ConfigError):
        recorded = newest_start(Path(plan.args.save)).get("data")
    if not isinstance(recorded, dict):
        return []
    return [f"the {name} data is not that of the run's last start: do not compare its losses with earlier ones"
            for name in plan.datasets
            if name != "train" and name in recorded and recorded[name] != plan.datasets[name].fingerprint]
