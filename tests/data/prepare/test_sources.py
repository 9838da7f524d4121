"""Counts and statistics of each source in the summary: right by hand, and the same with any workers and shards."""

import json
import random
from pathlib import Path

import pytest

import pretrain.data.text_inputs.reader
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard
from pretrain.data.prepare.summary import read_summary, summary_text
from pretrain.data.prepare.text_quality import FIELDS, is_sampled, measure, quality_summary, sampled_fraction
from pretrain.data.tokenizers.tokenizer import Tokenizer
from tests.data.prepare.helpers import TEXTS, jsonl, merge_shards_of, output


def counts(text: str) -> dict[str, int]:
    return dict(zip(FIELDS, map(int, measure(text)), strict=True))


def limits(text: str) -> set[str]:
    """Return the limits that a document exceeds."""
    return {name for name, count in counts(text).items() if count and name in FIELDS[8:]}


def test_counts_of_a_text() -> None:
    text = "The cat, and 12 dogs.\n\n  the end  \nthe end\n12 -- #\n"
    found = counts(text)
    assert {name: found[name] for name in FIELDS[:8]} == {
        "documents": 1, "characters": len(text), "letters": 25, "words": 12, "word_characters": 34, "lines": 4,
        "duplicate_lines": 1, "terminal_punctuation_lines": 1}
    assert counts("Größe 日本 ½")["letters"] == 7
    assert set(counts("").values()) == {0, 1}


def test_limits_of_published_filters() -> None:
    plain = "It was to be the best of times, and the worst that men have seen with their own eyes.\n"
    prose = "".join(f"{number} {plain}" for number in range(10))
    assert limits(prose) == set()
    assert limits(plain) == {"under_50_words"}
    assert limits("the be " * 50_001) == {"over_100000_words", "mean_word_length_not_3_to_10"}
    assert limits("extraordinarily " * 60) == {"mean_word_length_not_3_to_10", "under_2_stop_words"}
    assert limits(prose + "#" * 30) == {"over_0.1_symbols_per_word"}
    assert limits(prose + " 123" * 60) == {"under_80%_words_with_letters"}
    assert limits("".join(f"- {number} {plain}" for number in range(10))) == {"over_90%_bullet_lines"}
    assert "over_30%_ellipsis_lines" in limits(prose.replace("eyes.", "eyes..."))
    assert limits(plain * 10) == {"over_30%_duplicate_lines"}
    assert limits(prose + "{ Lorem Ipsum") == {"curly_bracket", "lorem_ipsum"}
    assert limits("слово и дело " * 20) == {"under_2_stop_words"}


def test_samples_are_small_and_near_their_fraction() -> None:
    assert sampled_fraction(100_000, 1) == 1
    for num_bytes in (10**7, 10**9, 10**12):
        assert 2**19 < num_bytes * sampled_fraction(num_bytes, 1) <= 2**26
    generator = random.Random(1)
    texts = [" ".join(generator.choices(["a", "b", "c"], k=20)) for _ in range(4000)]
    assert 350 < sum(is_sampled(text, 0.1) for text in texts) < 450
    assert quality_summary([0] * len(FIELDS))["mean_word_length"] is None


def test_sources_are_the_words_of_the_command_line(tmp_path: Path, tokenizer: Tokenizer,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers, small batches and shards, counts and statistics are the same. Only a sample is measured."""
    from pretrain.data.prepare import text_quality

    monkeypatch.setattr(text_quality, "sampled_fraction", lambda num_bytes, num_sources: 0.6)
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 8192)
    (tmp_path / "folder").mkdir()
    for start, name in enumerate("ab"):
        jsonl(tmp_path / "folder" / f"{name}.jsonl", TEXTS[start::2])
    (tmp_path / "long.txt").write_text(TEXTS[0] * 3)
    (tmp_path / "empty.txt").write_text("")
    words = [str(tmp_path / "folder"), *(str(tmp_path / name) for name in ("long.txt", "empty.txt", "folder/b.jsonl"))]
    settings, results = PrepareSettings(deduplicate=True), []
    for workers in (1, 2):
        prepare(words, tokenizer=str(tokenizer.path), out=str(tmp_path / f"out{workers}"), settings=settings,
                workers=workers)
        results.append(output(tmp_path / f"out{workers}"))
    shards = [Shard(index, 4) for index in range(4)]
    for shard in shards:
        prepare(words, tokenizer=str(tokenizer.path), out=str(tmp_path / "out"), settings=settings, workers=1,
                shard=shard)
    merge_shards_of(tmp_path / "out")
    assert results[0] == results[1] == output(tmp_path / "out")
    summary = read_summary(tmp_path / "out")
    rows = summary["sources"]
    assert [row["source"] for row in rows] == words
    assert [row["documents"] for row in rows] == [len(TEXTS), 1, 0, 0]
    assert [row["duplicates"] for row in rows] == [0, 0, 0, len(TEXTS[1::2])]
    assert [row["text_bytes"] for row in rows[:2]] == [sum(len(text.encode()) for text in TEXTS),
                                                       3 * len(TEXTS[0].encode())]
    assert sum(row["tokens"] for row in rows) == summary["tokens"]
    assert [row["quality"]["measured_documents"] for row in rows] == [
        sum(is_sampled(text, 0.6) for text in texts) for texts in (TEXTS, [], [], TEXTS[1::2])]
    assert 0 < rows[0]["quality"]["measured_documents"] < len(TEXTS)
    letters, characters = (sum(counts(text)[name] for text in TEXTS if is_sampled(text, 0.6))
                           for name in ("letters", "characters"))
    assert rows[0]["quality"]["letters_per_character"] == round(letters / characters, 4)


def test_the_table_of_sources_fits_a_terminal(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = [jsonl(tmp_path / f"{'long-name-' * 3}{number}.jsonl", TEXTS[: number + 1]) for number in range(7)]
    prepare(files, tokenizer=str(tokenizer.path), out=str(tmp_path / "out"))
    table = summary_text(tmp_path / "out").partition("  source ")[2].splitlines()
    assert len(table) == 7
    assert max(map(len, table[:-1])) <= 80
    assert table[1].startswith("  ...") and "6.jsonl" in table[1], "the largest one"  # noqa: PT018
    assert table[-1] == f"    ... all 7 are in {tmp_path / 'out'}.summary.json"
    assert len(json.loads((tmp_path / "out.summary.json").read_text())["sources"]) == 7
