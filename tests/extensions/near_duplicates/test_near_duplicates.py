"""Near-duplicates: as found by brute force; the same with any workers, batches, kills and shards; little memory."""

import itertools
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pretrain.data.prepare.partial_output
import pretrain.data.text_inputs.reader
import pretrain.extensions.near_duplicates.near_duplicates
from pretrain.data.prepare import hash_tables
from pretrain.data.prepare.document_step import ORIGIN
from pretrain.data.prepare.partial_output import AppendFile
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard
from pretrain.data.prepare.summary import read_summary, summary_text
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.near_duplicates import signatures
from pretrain.extensions.near_duplicates.near_duplicates import RECORD, NearDuplicates, band_size, make_records
from pretrain.extensions.near_duplicates.signatures import NUM_VALUES, shingles, sign
from pretrain.extensions.near_duplicates.step import NearDuplicateStep
from tests.data.prepare.helpers import SOURCES, documents, edited, jsonl, merge_shards_of, output, run_tool, sentence
from tests.data.prepare.test_resume import in_child, kill_at_call


def near(choice: str | None, threshold: float = 0.8) -> PrepareSettings:
    return PrepareSettings(steps=[NearDuplicateStep(choice, threshold)])




def plain_shingles(text: str) -> set[tuple[str, ...]]:
    """Return the sets of 5 words of an ASCII text, as the definition says."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[start : start + 5]) for start in range(max(len(words) - 4, 1))} if words else set()


def jaccard(left: set[Any], right: set[Any]) -> float:
    return len(left & right) / max(len(left | right), 1)


def corpus(num_originals: int, seed: int) -> list[str]:
    """Return texts and edited copies of them, in random order: 1%, 2%, 5%, 20% and 50% of their words are changed."""
    generator = random.Random(seed)
    texts = []
    for _ in range(num_originals):
        words = sentence(generator, generator.randrange(60, 400))
        texts += [" ".join(words), *(" ".join(edited(words, fraction, generator)) + "!"
                                     for fraction in (0.01, 0.02, 0.05, 0.2, 0.5))]
    generator.shuffle(texts)
    return texts


def removed_by_brute_force(texts: list[str], threshold: float) -> tuple[list[int], list[float]]:
    """Return the documents that are near-duplicates by exact similarities, and each one's largest similarity to an
    earlier document that is kept."""
    kept: list[set[Any]] = []
    removed, largest = [], []
    for number, found in enumerate(map(plain_shingles, texts)):
        similarity = max((jaccard(found, other) for other in kept), default=0.0)
        largest.append(similarity)
        if similarity >= threshold:
            removed.append(number)
        else:
            kept.append(found)
    return removed, largest


def test_shingles_are_those_of_the_definition() -> None:
    texts = [path.read_text() for path in SOURCES] + ["", "a b", "!!", "one two three four five", "A, b. C", "x " * 90]
    texts = [text for text in texts if text.isascii()]
    hashes, offsets = shingles(texts)
    for other in ([], ["é ü"]):  # a text that is not ASCII takes another path
        found, bounds = shingles([*texts, *other])
        assert found[: len(hashes)].tolist() == hashes.tolist()
        assert bounds[: len(offsets)].tolist() == offsets.tolist()
    sets = [set(hashes[start:stop].tolist()) for start, stop in itertools.pairwise(offsets)]
    plain = [plain_shingles(text) for text in texts]
    assert [len(one) for one in sets] == [len(one) for one in plain]
    assert len(set().union(*sets)) == len(set().union(*plain))


@pytest.mark.parametrize(("text", "same", "count"), [
    ("Ein Möwenflug -- über\u00a0\u201cdie See\u201d!", "ein möwenflug über die see", 1),  # 5 words
    ("你好世界。你好", "你好世界 你好", 2),  # 6 words of one character
    ("สวัสดีครับ", "สวัสดีครับ", 6), ("😀 a", "😀a", 1), ("word", "WORD?", 1), ("...", "", 0)])
def test_words_of_other_scripts(text: str, same: str, count: int) -> None:
    hashes, offsets = shingles([text, same])
    assert offsets.tolist() == [0, count, 2 * count]
    assert hashes[:count].tolist() == hashes[count:].tolist()


def test_a_signature_does_not_depend_on_other_texts_and_parts_have_its_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*corpus(6, 0), "", "short", "é" * 3, "日本語のテキスト"]
    together = sign(texts)
    assert together.shape == (len(texts), NUM_VALUES)
    monkeypatch.setattr(signatures, "_BLOCK_CHARACTERS", 700)
    assert (sign(texts) == together).all()
    assert (np.concatenate([sign([text]) for text in texts]) == together).all()
    assert (together[texts.index("")] == 0xFFFFFFFF).all()
    words = texts[0].split()
    parts = sign([" ".join(words[:40]), " ".join(words[36:])])  # no shingle is lost at the cut
    assert (parts.min(axis=0) == together[0]).all()


@pytest.mark.parametrize("threshold", [0.6, 0.8, 0.95])
def test_finds_what_brute_force_finds(tmp_path: Path, tokenizer: Tokenizer, threshold: float) -> None:
    """Documents whose exact similarity is near the threshold may be on either side of it."""
    texts = corpus(60, 1)
    expected, largest = removed_by_brute_force(texts, threshold)
    prepare([jsonl(tmp_path / "a.jsonl", texts)], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"),
            settings=near("remove", threshold), workers=1)
    kept = set(documents(tmp_path / "out", tokenizer))
    removed = [number for number, text in enumerate(texts) if text not in kept]
    far_above = [number for number in expected if largest[number] >= threshold + 0.1]
    assert set(far_above) <= set(removed)
    assert all(largest[number] >= threshold - 0.12 for number in removed)  # 3 standard deviations
    both = len(set(removed) & set(expected))
    assert both / len(expected) > 0.75, "recall"
    assert both / len(removed) > 0.75, "precision"
    summary = read_summary(tmp_path / "out")["near_duplicates"]
    assert (summary["documents"], summary["removed"], summary["threshold"]) == (len(removed), True, threshold)


def test_the_report(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Counts, tokens and places of what was removed; exact duplicates are counted as such; counting removes nothing."""
    generator = random.Random(3)
    words = [sentence(generator, 100) for _ in range(3)]
    first, second, third = (" ".join(text) for text in words)
    similar = " ".join([*words[0][:-1], "changed"])
    texts = [first, second, similar.upper(), first, third + ".", "(" + second, "", "?", "!"]
    one = jsonl(tmp_path / "a.jsonl", texts[:2])
    two = jsonl(tmp_path / "b.jsonl", texts[2:])
    for choice in ("remove", "count"):
        out = tmp_path / choice
        done = run_tool(one, two, "--tokenizer", str(tokenizer.path), "--out", str(out), "--near_duplicates", choice)
        assert done.returncode == 0, done.stderr
        kept = [first, second, third + ".", "?", "!"]
        expected = kept if choice == "remove" else [text for text in texts if text]
        assert documents(out, tokenizer) == expected
        summary = read_summary(out)
        assert (summary["duplicate_documents"], summary["duplicates_removed"]) == (1, choice == "remove")
        found, exact = summary["near_duplicates"], len(tokenizer.encode(similar.upper())) + 1
        samples = found.pop("samples")
        assert found == {"documents": 2, "removed": choice == "remove", "threshold": 0.8,
                        "tokens": exact + len(tokenizer.encode("(" + second)) + 1}
        assert [(sample["place"], sample["earlier"]) for sample in samples] == [
            (f"{two}:1", f"{one}:1"), (f"{two}:4", f"{one}:2")]
        assert 0.9 < samples[0]["similarity"] < 1.0 == samples[1]["similarity"]
        assert f"    {two}:4: 1.00 like {one}:2\n" in done.stdout
        assert "2 of similarity 0.8 or more (" in done.stdout
        rows = summary["sources"]
        assert [(row["source"], row["duplicates"], row["near_duplicates"]) for row in rows] == [
            (one, 0, 0), (two, 1, 2)]
        assert sum(row["tokens"] for row in rows) == summary["tokens"] == IndexedDataset(out).num_tokens
    prepare([one], tokenizer=str(tokenizer.path), out=str(tmp_path / "without"), settings=near(None))
    assert read_summary(tmp_path / "without")["near_duplicates"] is None
    assert "near-duplicates" not in summary_text(tmp_path / "without")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks, batches and tables, and a saved state after each batch."""
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(pretrain.extensions.near_duplicates.near_duplicates, "_BATCH", 3)
    monkeypatch.setattr(NearDuplicates.__init__, "__kwdefaults__", {"first_slots": 16})
    monkeypatch.setattr(pretrain.data.prepare.partial_output, "_LARGEST_COST", float("inf"))


def mixed_inputs(folder: Path) -> list[str]:
    """Write inputs with near-duplicates among lines, and among texts of several batches."""
    generator = random.Random(5)
    long = sentence(generator, 6000)
    (folder / "long.txt").write_text(" ".join(long))
    (folder / "near.txt").write_text(" ".join(edited(long, 0.005, generator)))
    (folder / "other.txt").write_text(" ".join(edited(long, 0.3, generator)))
    texts = corpus(40, 2)
    long_texts = [str(folder / f"{name}.txt") for name in ("long", "near", "other")]
    return [jsonl(folder / "a.jsonl", texts[:120]), *long_texts,
            jsonl(folder / "b.jsonl", [*texts[100:], *texts[:3]])]


def test_the_same_with_any_batches_workers_and_kills(tmp_path: Path, tokenizer: Tokenizer,
                                                     request: pytest.FixtureRequest) -> None:
    inputs = mixed_inputs(tmp_path)

    def run(out: str, workers: int = 1, choice: str = "remove") -> dict[str, bytes]:
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / out), workers=workers,
                settings=near(choice), seconds_between_states=0)
        return output(tmp_path / out)

    large = run("large")
    counted = json.loads(run("counted", choice="count")["summary.json"])
    request.getfixturevalue("small")
    expected = run("whole")
    assert expected["summary.json"] == run("two", workers=2)["summary.json"]
    assert expected["bin"] == run("two_again", workers=2)["bin"]
    summary = json.loads(expected["summary.json"])
    assert summary["near_duplicates"]["documents"] > 40
    assert [row["near_duplicates"] for row in summary["sources"]][1:4] == [0, 1, 0]
    # With these small chunks, a text file is signed in parts; what is found remains the same.
    assert json.loads(large["summary.json"])["near_duplicates"]["documents"] == summary["near_duplicates"]["documents"]
    assert counted["near_duplicates"]["documents"] == summary["near_duplicates"]["documents"]
    assert counted["documents"] == sum(summary[key] for key in ("documents", "duplicate_documents")) + \
        summary["near_duplicates"]["documents"]
    generator, kills = random.Random(7), 0
    for _ in range(3):
        while in_child(lambda: (kill_at_call(generator.randrange(20, 900)), run("out"))) == -signal.SIGKILL:
            kills += 1
            generator.random()  # the child has a copy of the generator
        assert output(tmp_path / "out") == expected
        for path in tmp_path.glob("out.*"):
            if path.is_file():
                path.unlink()
    assert kills >= 2


def test_shards_give_the_bytes_of_one_machine(tmp_path: Path, tokenizer: Tokenizer, small: None) -> None:
    """A shard cannot know which of its documents are near-duplicates: the merge finds them."""
    inputs = mixed_inputs(tmp_path)
    for choice in ("remove", "count"):
        settings = near(choice)
        one, out = tmp_path / f"one_{choice}", tmp_path / choice
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(one), settings=settings, workers=1)
        expected = output(one)
        shards = [Shard(index, 3) for index in range(3)]
        for shard in shards:
            prepare(inputs, tokenizer=str(tokenizer.path), out=str(out), settings=settings, workers=1, shard=shard)
            assert read_summary(shard.prefix(str(out)))["near_duplicates"] is None
        merge_shards_of(out, steps=settings.steps)
        assert output(out) == expected


def test_another_version_of_the_library_is_rejected(tmp_path: Path, tokenizer: Tokenizer, small: None,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signatures may be different (rensa 0.4 and 0.5), so that documents before and after would not match."""
    inputs = mixed_inputs(tmp_path)

    def run() -> None:
        prepare(inputs, tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), settings=near("remove"), workers=1,
                seconds_between_states=0)

    assert in_child(lambda: (kill_at_call(400), run())) == -signal.SIGKILL
    monkeypatch.setattr(signatures, "_SEED", 2)
    with pytest.raises(ConfigError, match=r"was different: version of rensa\. Give the same command"):
        run()


def test_missing_library_and_useless_threshold(tmp_path: Path, tokenizer: Tokenizer,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["a"])
    words = [source, "--tokenizer", str(tokenizer.path), "--out", str(tmp_path / "out")]
    failed = run_tool(*words, "--near_threshold", "0.9")
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert "--near_threshold: it has no effect without --near_duplicates" in failed.stderr
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ConfigError, match=r"rensa is not installed. Run `pip install 'ds-pretrain\[dedup\]'`"):
        prepare([source], tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), settings=near("remove"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("small_table_bytes", [1 << 25, 0])
def test_tables_of_any_size_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          small_table_bytes: int) -> None:
    """The table doubles, is rebuilt from the file, and a document is compared with the first of each band."""
    monkeypatch.setattr(hash_tables, "_SMALL_TABLE_BYTES", small_table_bytes)
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2**32, (600, NUM_VALUES), np.uint32)
    for number in range(0, 600, 3):  # two documents that are similar to an earlier one
        for other in (number + 1, number + 2):
            is_changed = generator.random(NUM_VALUES) < 0.1 * generator.random()
            values[other] = np.where(is_changed, values[other], values[number])
    order = generator.permutation(600)
    origins = np.zeros(600, ORIGIN)
    origins["line"] = np.arange(600)
    records = make_records(origins, values[order])
    results = []
    for slots, batch in ((16, 1), (1 << 16, 600), (64, 50)):
        (tmp_path / str(slots)).mkdir()
        file = AppendFile(tmp_path / str(slots) / "signatures", 0)
        index, found = NearDuplicates(tmp_path / str(slots) / "bands", file, 0.8, first_slots=slots), []
        for first in range(0, 600, batch):
            found += [(first + one.index, one.earlier_line, one.similarity)
                      for one in index.add(records[first : first + batch])]
            if batch == 50 and first % 200 == 0:  # as after a kill
                index = NearDuplicates(tmp_path / str(slots) / "bands", file, 0.8, first_slots=slots)
        results.append(found)
        assert file.size == (600 - len(found)) * RECORD.itemsize
        index.close()
    assert results[0] == results[1] == results[2]
    # The same by comparing all pairs. A pair shares no band with a probability of at most 5%.
    kept: list[int] = []
    expected = []
    for number, row in enumerate(records["signatures"]):
        similar = [line for line in kept if (records["signatures"][line] == row).mean() >= 0.8]
        if similar:
            expected.append((number, similar[0]))
        else:
            kept.append(number)
    found_pairs = [(index, line) for index, line, _ in results[0]]
    assert len(set(found_pairs) ^ set(expected)) <= 0.02 * len(expected)


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.93, 1.0])
def test_pairs_at_the_threshold_share_a_band(threshold: float) -> None:
    size = band_size(threshold)
    assert 1 - (1 - threshold**size) ** (NUM_VALUES // size) >= 0.95


_LOOK_UP = """
import resource, sys
import numpy as np
from pathlib import Path
from pretrain.data.prepare.hash_tables import SlotTable
table = SlotTable(Path(sys.argv[1]), 1, 1 << 25)
before, generator = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, np.random.default_rng(0)
for _ in range(60):
    keys = generator.integers(1, 2**63, 4000, np.uint64)
    is_same = lambda entries, numbers: entries[:, 0] == keys[numbers]
    table.insert(keys, keys[:, None], is_same)
    assert (table.find(keys, is_same)[:, 0] == keys).all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_large_table_is_not_in_the_memory_of_the_process(tmp_path: Path) -> None:
    """240,000 keys touch most pages of the table of 256 MiB, which is not mapped."""
    done = subprocess.run([sys.executable, "-c", _LOOK_UP, str(tmp_path / "table")], capture_output=True, text=True,
                          check=True)
    print(f"{done.stdout.strip()} MiB")
    assert int(done.stdout) < 32
