"""Compare the data and the tokenizer of a run with the checkpoint that it resumes from."""

import contextlib
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

from pretrain.checkpoint.format.manifest import Manifest, tokenizer_fingerprint
from pretrain.config.flags.check_flags import allows_other_data
from pretrain.config.plan import Plan
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import SampleDataset, source_records
from pretrain.data.samples.own import OwnSamples
from pretrain.data.samples.read_order import REORDER, SKIP, recorded_read_order
from pretrain.data.token_files.check_hashes import CHECK_S, FoundHashes, check_blocks, find_hashes, hash_if_fast
from pretrain.data.token_files.hashes import BLOCK_BYTES
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.errors import ConfigError, shorten
from pretrain.monitor.read_run_folder import newest_start, read_rows

HASHED_EVENT = "data_hashed"  # row of events.jsonl with the fields of `SampleDataset.record`
OTHER_BYTES = "unknown"  # its `sha256` if the data was changed before all of it was hashed
_FAST_S = 2.0  # data that is hashed within this time is hashed at the start
_SHOWN = 12  # digits of a hash in a message


def stored_hashes(plan: Plan, indexed: IndexedDataset) -> FoundHashes:
    """Read the hashes of a data set: next to it, or in the run folder if the folder of the data is read-only."""
    return find_hashes(indexed, fallback_path(plan, indexed))


def fallback_path(plan: Plan, indexed: IndexedDataset) -> Path:
    """Return the path of the hashes in the run folder. If the dataset has several sources, it names the source."""
    name, dataset = next((name, dataset) for name, dataset in plan.datasets.items() if indexed in dataset.sources)
    source = ""
    if len(dataset.sources) > 1:
        path = str(indexed.prefix) if indexed.is_remote else os.path.abspath(str(indexed.prefix))
        source = f".{indexed.prefix.name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    return Path(plan.args.save) / f"{name.replace('/', '_')}_data{source}.sha256.json"


def check_sampled_blocks(plan: Plan) -> list[str]:
    """Compare randomly chosen blocks of the data with stored hashes. Raises ConfigError if one differs.

    Returns notes about stored hashes that cannot be used. All sources share the time, in random order: at least one
    block is read.
    """
    sources = list({id(indexed): indexed for dataset in plan.datasets.values() for indexed in dataset.sources}.values())
    random.SystemRandom().shuffle(sources)
    notes: list[str] = []
    end = time.monotonic() + CHECK_S
    has_checked = False
    for indexed in sources:
        found = stored_hashes(plan, indexed)
        notes += (*indexed.notes, *found.notes)
        if not has_checked or time.monotonic() < end:
            check_blocks(indexed, found, seconds=CHECK_S / len(sources))
            has_checked = has_checked or found.current is not None
        if found.current is not None and found.current.is_complete:
            indexed.hashes = found.current
        elif indexed.is_remote and indexed.file.status().st_size > BLOCK_BYTES:
            notes.append(f"{indexed.prefix}: the SHA-256 of all its bytes is not known, because there is no complete "
                         ".sha256.json; data in an object store is not downloaded to be hashed. Its index and samples "
                         "of its tokens are compared instead")
    return notes


def check_same_data(manifest: Manifest, plan: Plan, folder: Path, consumed: int) -> str:
    """Compare the training data with the checkpoint's. `consumed`: samples with which the run continues.

    Returns a note if it differs and --override data accepts this, else "". Raises ConfigError for other data. Large
    data that has no hash yet is compared by samples.
    """
    problem = _difference(manifest, plan, folder, consumed)
    if not problem:
        return ""
    if allows_other_data(plan.args):
        return f"{plan.data.train_flag}: {problem}; --override data: training continues at sample " \
               f"{consumed:,} of this data"
    raise ConfigError(plan.data.train_flag, problem=problem,
                      remedy="give the data of the checkpoint, or continue with this data by --override data")


def check_read_order(manifest: Manifest, plan: Plan, folder: Path, consumed: int) -> None:
    """Raise ConfigError if the run up to the checkpoint would have read other samples with the flags of this run."""
    before, now = recorded_read_order(manifest.recipe), plan.read_order
    if before.is_same_before(now, consumed):
        return
    for flag, earlier, given in ((SKIP, before.skipped, now.skipped), (REORDER, before.reordered, now.reordered)):
        if earlier != given:
            recorded = manifest.recipe.get(flag.removeprefix("--"))
            raise ConfigError(flag, problem=f"it would change samples before {before.end_of(consumed):,}, which the "
                              f"run has read or left out when {folder} was saved", remedy="name samples from there on, "
                              f"{f'besides the recorded {recorded}, ' if recorded else ''}or begin with a checkpoint "
                              "from before the samples")


def blend_note(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Return a note if the weights of the blend change after the data position of the checkpoint, else ""."""
    saved, current = (facts.get("proportions") for facts in (manifest.data or {}, plan.datasets["train"].record()))
    if saved == current or None in (saved, current) or allows_other_data(plan.args):
        return ""
    return f"{folder.name} was trained with the weights {_weights(saved)}; this run continues with {_weights(current)}"


def adopted_data_note(manifest: Manifest, plan: Plan, consumed: int) -> str:
    """Return a note about the data position if an adopted run does not record its data, else ""."""
    if manifest.adopted is None or "data_fingerprint" not in manifest.unknown:
        return ""
    return f"the checkpoint of {manifest.adopted.get('program')} does not record its data: this run continues at " \
           f"sample {consumed:,} of {plan.data.train_flag}, and pins it from here on"


def _difference(manifest: Manifest, plan: Plan, folder: Path, consumed: int) -> str:
    """Return how the training data differs from the checkpoint's; "": it does not, as far as is known."""
    if "data_fingerprint" in manifest.unknown:
        return ""
    dataset, saved = plan.datasets["train"], manifest.data or {}
    if "items" in saved or isinstance(dataset, OwnSamples):
        return _other_items(saved, manifest.data_fingerprint, dataset, folder)
    position = recorded_read_order(manifest.recipe).end_of(consumed)
    problem = _other_sources(saved, dataset, folder, position) if manifest.data is not None else ""
    if problem:
        return problem
    saved_sources = saved.get("sources", [saved])
    expected = expected_sources(manifest, plan, folder.parent.parent)
    end = time.monotonic() + _FAST_S
    for indexed, sha256 in zip(dataset.sources, expected, strict=True):
        if sha256 is not None and indexed.hashes is None and time.monotonic() < end:
            hash_if_fast(indexed, end - time.monotonic())
    current = source_records(dataset)
    where = [f"{indexed.prefix} is not the data" if len(current) > 1 else "this is not the data" for indexed, _ in
             current]
    for what, sha256, (_, record) in zip(where, expected, current, strict=True):
        if sha256 is not None and record["sha256"] is not None and sha256 != record["sha256"]:
            return _other_content(what, folder, f"SHA-256 {sha256[:_SHOWN]}", f"SHA-256 {record['sha256'][:_SHOWN]}")
    if _has_fingerprint(dataset, manifest.data_fingerprint, saved):
        return ""
    for what, earlier, (_, record) in zip(where, saved_sources, current, strict=True):
        if earlier.get("bin_bytes") not in (None, record["bin_bytes"]):
            return _other_content(what, folder, f"{earlier['bin_bytes']:,} bytes", f"{record['bin_bytes']:,} bytes")
    if None in expected or any(record["sha256"] is None for _, record in current):
        return _other_content("this is not the data", folder, f"fingerprint {manifest.data_fingerprint[:_SHOWN]}",
                              f"fingerprint {dataset.fingerprint[:_SHOWN]}")
    return _other_ranges(saved_sources, current, folder)


def _other_items(saved: dict[str, Any], fingerprint: str, dataset: SampleDataset, folder: Path) -> str:
    """Return how a dataset of --dataset_module differs from the checkpoint's; "": it does not."""
    record = dataset.record()
    if ("items" in saved) != ("items" in record):
        kinds = ["a dataset of --dataset_module" if "items" in facts else "token files" for facts in (saved, record)]
        return f"{folder.name} was trained on {kinds[0]}, and this run would train on {kinds[1]}"
    if saved["items"] != record["items"]:
        return _other_content("this is not the data", folder, f"{saved['items']:,} items", f"{record['items']:,} items")
    if saved.get("own_fingerprint") != record["own_fingerprint"]:
        texts = [f"fingerprint() {shorten(str(facts.get('own_fingerprint')), 40)}" for facts in (saved, record)]
        return _other_content("this is not the data", folder, *texts)
    return "" if fingerprint == dataset.fingerprint else \
        f"{folder.name} was trained on other samples of this data: a setting of the samples is another one"


def _other_sources(saved: dict[str, Any], dataset: SampleDataset, folder: Path, position: int) -> str:
    """Return how the list of sources, their weights or the order of samples differ from the checkpoint's."""
    record = dataset.record()
    names = [[Path(str(source.get("prefix", "one source"))).name for source in facts.get("sources", [{}])]
             for facts in (saved, record)]
    if len(names[0]) == 1:
        names[1] = names[1] if len(names[1]) > 1 else names[0]
    if len(names[0]) != len(names[1]):
        return f"{folder.name} was trained on {_list(names[0])}, and this run would train on {_list(names[1])}"
    if names[0] != names[1] and sorted(names[0]) == sorted(names[1]):
        return f"the sources of {folder.name} are in the order {_list(names[0])}, and here {_list(names[1])}"
    # phases that begin after the data position may change
    phases = [[phase for phase in facts.get("proportions", []) if phase["from_samples"] < max(position, 1)]
              for facts in (saved, record)]
    if phases[0] != phases[1]:
        return f"{folder.name} was trained with the weights {_weights(phases[0])}, and this run would use " \
               f"{_weights(phases[1])} (--blend_schedule {position * dataset.seq_length}:W1,W2,... changes them from " \
               "here on)"
    settings = [facts.get("sources", [facts])[0] for facts in (saved, record)]
    for key, default in (("sample_order", "shuffled"), ("packing", "none")):
        values = [facts.get(key) or default for facts in settings]
        if values[0] != values[1]:
            return f"{folder.name} was trained with --{key} {values[0]}, and this run would use {values[1]}"
    planned = [facts.get("order_samples", of_first.get("order_samples"))
               for facts, of_first in zip((saved, record), settings, strict=True)]
    if planned[0] != planned[1]:
        return f"the order of the samples depends on their number: {folder.name} is part of a run of {planned[0]:,} " \
               f"samples, and this run has {planned[1]:,}"
    return ""


def _list(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 9 else f"{', '.join(names[:8])} ... ({len(names)} sources)"


def _weights(proportions: Any) -> str:
    """Return the weights of each phase as text."""
    phases = proportions if isinstance(proportions, list) else []
    return "; ".join((f"from sample {phase['from_samples']:,} on " if phase["from_samples"] else "")
                     + ", ".join(f"{weight:.4g}" for weight in phase["weights"]) for phase in phases) or "of one source"


def _other_ranges(saved: list[dict[str, Any]], current: list[tuple[IndexedDataset, dict[str, Any]]],
                  folder: Path) -> str:
    """Return which tokens of the same data the checkpoint was trained on, and this run would be."""
    for earlier, (indexed, record) in zip(saved, current, strict=True):
        ranges = [f"{values.get('first_token'):,} to {values.get('last_token'):,}" for values in (earlier, record)]
        if ranges[0] != ranges[1]:
            what = "this data" if len(current) == 1 else str(indexed.prefix)
            return f"{folder.name} was trained on tokens {ranges[0]} of {what}, and this run would train on tokens " \
                   f"{ranges[1]}: --split or the validation data is another one"
    return f"{folder.name} was trained on other samples of this data: a setting of the samples is another one"


def _has_fingerprint(dataset: SampleDataset, recorded: str, saved: dict[str, Any]) -> bool:
    """Return whether a checkpoint recorded this fingerprint.

    `saved`: the facts of its manifest. The weights of a blend have been compared already.
    """
    if isinstance(dataset, BlendedSamples) and "proportions" in saved:
        return dataset.fingerprint_with(saved["proportions"]) == recorded
    return dataset.fingerprint == recorded


def _other_content(what: str, folder: Path, saved: str, current: str) -> str:
    return f"{what} that {folder} was trained on ({saved} there, {current} here)"


def expected_sources(manifest: Manifest, plan: Plan, run: Path) -> list[str | None]:
    """Return the hash of each source of the training data; None if it is not known. `run`: its folder."""
    sources, saved = plan.datasets["train"].sources, manifest.data or {}
    records = saved.get("sources", [saved])
    if len(records) != len(sources):
        return [None] * len(sources)
    return [expected_sha256(record, plan, indexed, run) for record, indexed in zip(records, sources, strict=True)]


def expected_sha256(saved: dict[str, Any], plan: Plan, indexed: IndexedDataset, run: Path) -> str | None:
    """Return the hash of a source that the checkpoint was trained on; None if it is not known.

    A checkpoint that was saved before its data was hashed has no hash. Then an event of the run, or stored hashes, may
    have the hash of the data with this size and modification time. `saved`: the facts that the manifest has about it.
    """
    if not saved or saved.get("sha256") is not None:
        return _text(saved.get("sha256"))
    key = (saved.get("bin_bytes"), saved.get("bin_mtime_ns"))
    name = Path(str(saved["prefix"])).name if "prefix" in saved else None
    for row in read_rows(run / "events.jsonl"):
        if row.get("event") == HASHED_EVENT and (row.get("bin_bytes"), row.get("bin_mtime_ns")) == key and \
                (name is None or row.get("name") in (None, name)):
            return _text(row.get("sha256"))
    found = stored_hashes(plan, indexed)
    for hashes in (found.current, found.earlier):
        if hashes is not None and hashes.is_complete and (hashes.bin_bytes, hashes.bin_mtime_ns) == key:
            return hashes.sha256
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def check_same_tokenizer(manifest: Manifest, plan: Plan, folder: Path) -> str:
    """Compare the tokenizer with the checkpoint's.

    Returns a note if it differs and --override data accepts this, or if only one of them has a tokenizer, else "".
    Raises ConfigError for another tokenizer: the same token ids would mean other text.
    """
    saved, current = manifest.tokenizer_fingerprint, tokenizer_fingerprint(plan)
    if saved == current:
        return ""
    if saved is None or current is None:
        return f"{folder.name} was saved {'without' if saved is None else 'with'} --tokenizer"
    problem = f"this is not the tokenizer of {folder} (SHA-256 {saved[:_SHOWN]} there, {current[:_SHOWN]} here)"
    if allows_other_data(plan.args):
        return f"--tokenizer {plan.args.tokenizer}: {problem}"
    raise ConfigError(f"--tokenizer {plan.args.tokenizer}", problem=problem,
                      remedy="give the tokenizer of the checkpoint, or continue with this one by --override data")


def evaluation_data_notes(plan: Plan, run: Path) -> list[str]:
    """Return a note for each of validation and test data that is not the same as at the run's last start."""
    recorded: Any = None
    with contextlib.suppress(ConfigError):
        recorded = newest_start(run).get("data")
    if not isinstance(recorded, dict):
        return []
    return [f"the {name} data is not that of the run's last start: do not compare its losses with earlier ones"
            for name in plan.datasets
            if name != "train" and name in recorded and recorded[name] != plan.datasets[name].fingerprint]
