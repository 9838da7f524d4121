"""Shards of a preparation: merged, they give the bytes of a preparation on one machine, and lost ones are named."""

import gzip
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import pretrain.data.prepare.document_writer
import pretrain.data.prepare.tokenize_batch
import pretrain.data.text_inputs.json_lines
import pretrain.data.text_inputs.parts
import pretrain.data.text_inputs.reader
import pretrain.extensions.merge_split.merge_shards
from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.prepare.shards import Shard, parse_shard
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from tests.data.prepare.helpers import TEXTS, content, jsonl, merge_shards_of
from tests.data.prepare.test_resume import in_child, kill_at_call
from tests.support.rejection import rejection
from tests.wrong_inputs.case import main_of

NUMBERS = (1, 2, 3, 7, 50)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all chunks, blocks and batches small, and long lines common."""
    monkeypatch.setattr(pretrain.data.text_inputs.reader, "CHUNK_BYTES", 2048)
    monkeypatch.setitem(pretrain.data.text_inputs.reader.read_chunks.__kwdefaults__ or {}, "long_bytes", 6000)
    monkeypatch.setattr(pretrain.data.text_inputs.json_lines, "PART_BYTES", 2048)
    monkeypatch.setattr(pretrain.data.text_inputs.parts, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(pretrain.data.prepare.tokenize_batch, "LONGEST_TEXT", 1000)
    monkeypatch.setattr(pretrain.extensions.merge_split.merge_shards, "_MOST_TOKENS", 700)
    monkeypatch.setattr(pretrain.extensions.merge_split.merge_shards, "_MOST_DOCUMENTS", 5)


def single(inputs: list[str], tokenizer: Tokenizer, out: Path, settings: PrepareSettings) -> dict[str, bytes]:
    """Prepare the inputs at once, and return what must be equal."""
    prepare(inputs, tokenizer=str(tokenizer.path), out=str(out), settings=settings, workers=1)
    return content(out)


def make(inputs: list[str], tokenizer: Tokenizer, out: Path, settings: PrepareSettings, shard: Shard,
         **flags: Any) -> None:
    prepare(inputs, tokenizer=str(tokenizer.path), out=str(out), settings=settings, workers=1, shard=shard, **flags)


def merge(out: Path, *, overwrite: bool = False) -> dict[str, bytes]:
    merge_shards_of(out, overwrite=overwrite)
    return content(out)


def _texts(generator: random.Random) -> list[str]:
    """Return texts of all sizes, of which some are equal."""
    words = ["a", "aa", "aaa", "b ", "\n", "\n\n", "\n\n\n", "\r\n", "é", "😀", "<|end|>\n", "word " * 50, "\u2028"]
    texts = ["".join(generator.choices(words, k=generator.randrange(40))) for _ in range(generator.randrange(25))]
    texts += ["".join(generator.choices(words, k=generator.randrange(200, 900))) for _ in range(2)]
    return [*texts, *generator.sample(texts, min(4, len(texts)))]


def _write(path: Path, generator: random.Random, separator: str, *, with_errors: bool) -> None:
    texts = _texts(generator)
    lines = [json.dumps({"text": text, "n": 1}, ensure_ascii=generator.random() < 0.5).encode() for text in texts]
    if with_errors:
        lines += [b'{"text": 5}', b'{"text": "\xff"}', b'{"text": "cut', b'{"text": "' + b"x" * 7000 + b"\xff" + b'"}']
    lines += [b"", b" \r"]
    generator.shuffle(lines)
    end = generator.choice([b"\n", b"\r\n"])
    as_lines = generator.choice([b"", b"\xef\xbb\xbf"]) + end.join(lines) + generator.choice([b"", b"\n"])
    errors = [b"\xff\xfe", b"x\0y", b"z" * 3000 + b"\xff"] if with_errors else []
    parts = [text.encode() for text in texts] + errors
    generator.shuffle(parts)
    as_text = generator.choice([b"", b"\xef\xbb\xbf"]) + (separator or "\n").encode().join(parts)
    if path.suffix == ".parquet":
        table = pyarrow.table({"text": pyarrow.array([*texts, *[None] * with_errors], pyarrow.string())})
        pyarrow.parquet.write_table(table, path, row_group_size=generator.choice([3, 100]))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(as_lines if ".jsonl" in path.name else as_text))
    else:
        path.write_bytes({".jsonl": as_lines, ".txt": as_text}.get(path.suffix, b""))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 60))])
def test_any_number_of_shards_gives_the_bytes_of_one_machine(tmp_path: Path, tokenizer: Tokenizer, small: None,
                                                             seed: int) -> None:
    """Random inputs of all formats; the first numbers of shards are more than the documents of some files."""
    generator = random.Random(seed)
    separator = ["", "\n\n", "aa", "\n", "<|end|>\n", "\n\n\n"][seed % 6]
    skips = generator.random() < 0.7
    names = ["a.jsonl", "b.txt", "c.parquet", "d.jsonl.gz", "e.empty", "f.txt", "g.jsonl", "h.txt.gz", "i.empty"]
    generator.shuffle(names)
    names = [name for name in names if generator.random() < 0.7 or name in ("b.txt", "a.jsonl")]
    for name in names:
        _write(tmp_path / name, generator, separator, with_errors=skips)
    inputs = [str(tmp_path / name) for name in [*names, *names[:1] * (seed % 2)]]
    settings = PrepareSettings(ReadSettings(document_separator=separator, skip_errors=skips),
                               append_eod=generator.random() < 0.8, deduplicate=generator.random() < 0.5)
    expected = single(inputs, tokenizer, tmp_path / "single", settings)
    for number in NUMBERS:
        out = tmp_path / f"out{number}"
        for index in generator.sample(range(number), number):
            make(inputs, tokenizer, out, settings, Shard(index, number))
        merged = merge(out)
        assert [name for name in expected if merged[name] != expected[name]] == [], f"{number} shards"


def test_lines_of_messages_count_from_the_beginning_of_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [b'{"text": "good"}'] * 30 + [b'{"text": 5}'] + [b'{"text": "good"}'] * 5
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    inputs, settings = [str(tmp_path / "a.jsonl")], PrepareSettings(ReadSettings(skip_errors=True))
    for index in range(4):
        make(inputs, tokenizer, tmp_path / "out", settings, Shard(index, 4))
    start = 17 * 27  # bytes of 27 lines: the first that begins after 3/4 of the bytes
    part = json.loads((tmp_path / "out.shard-00003-of-00004.summary.json").read_text())
    assert part["skipped_samples"][0]["place"] == f"{inputs[0]} (from byte {start}):4"
    summary = json.loads(merge(tmp_path / "out")["summary.json"])
    assert summary["skipped_samples"][0]["place"] == f"{inputs[0]}:31"
    with pytest.raises(ConfigError, match=rf"a.jsonl \(from byte {start}\):4: the value of 'text' is a JSON int"):
        make(inputs, tokenizer, tmp_path / "other", PrepareSettings(), Shard(3, 4))

    for index in range(3):  # --on_error skip is given again only for the shard that needs it, or for all
        make(inputs, tokenizer, tmp_path / "other", PrepareSettings(), Shard(index, 4))
        make(inputs, tokenizer, tmp_path / "other", settings, Shard(index, 4))  # it is complete
    make(inputs, tokenizer, tmp_path / "other", settings, Shard(3, 4))
    with pytest.raises(ConfigError, match=r"00003-of-00004.bin exists"):
        make(inputs, tokenizer, tmp_path / "other", PrepareSettings(), Shard(3, 4))
    assert merge(tmp_path / "other") == single(inputs, tokenizer, tmp_path / "single", settings)


def test_duplicates_are_counted_up_to_a_number_of_documents_that_batches_do_not_change(
        tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain.data.prepare.document_writer, "_MOST_COUNTED", 40)
    for number in (39, 40, 41):
        inputs = [jsonl(tmp_path / f"{number}.jsonl", [f"{line}" for line in range(number)] * 2)]
        expected = single(inputs, tokenizer, tmp_path / f"single{number}", PrepareSettings())
        assert json.loads(expected["summary.json"])["duplicate_documents"] == (39 if number == 39 else None)
        for index in range(3):
            make(inputs, tokenizer, tmp_path / f"out{number}", PrepareSettings(), Shard(index, 3))
        assert merge(tmp_path / f"out{number}") == expected


@pytest.mark.parametrize("deduplicate", [True, False])
def test_a_killed_shard_and_a_killed_merge(tmp_path: Path, tokenizer: Tokenizer, small: None, deduplicate: bool,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.data.prepare.partial_output._LARGEST_COST", float("inf"))
    inputs = [jsonl(tmp_path / "a.jsonl", TEXTS * 2)]
    settings, out = PrepareSettings(deduplicate=deduplicate), tmp_path / "out"
    expected = single(inputs, tokenizer, tmp_path / "single", settings)
    generator = random.Random(deduplicate)
    num_kills = 0

    def killed(work: Any, most: int) -> bool:
        status = in_child(lambda: (kill_at_call(generator.randrange(1, most)), work()))
        assert status in (0, -signal.SIGKILL)
        generator.random()
        return status != 0

    for index in range(3):
        def prepare_shard(index: int = index) -> None:
            make(inputs, tokenizer, out, settings, Shard(index, 3), seconds_between_states=0)

        num_kills += sum(killed(prepare_shard, 250) for _ in range(4))
        prepare_shard()
    for _ in range(4):
        if killed(lambda: merge(out, overwrite=True), 80):
            num_kills += 1
            assert not Path(f"{out}.idx").exists() or content(out) == expected
    assert num_kills >= 8
    assert merge(out, overwrite=True) == expected
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """Write 4 shards of three files, and return their folder."""
    folder = tmp_path_factory.mktemp("complete")
    for name in "abc":
        jsonl(folder / f"{name}.jsonl", [f"{name} {text}" for text in TEXTS])
    for index in range(4):
        command(folder, tokenizer, f"{index}/4")
    return folder


def command(folder: Path, tokenizer: Tokenizer, shard: str, *flags: str) -> int:
    """Run `ds-pretrain prepare FOLDER/*.jsonl --out FOLDER/out --shard ...` in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare", f"{folder}/*.jsonl", "--tokenizer", str(tokenizer.path), "--workers=1",
                                    "--out", f"{folder}/out", "--shard", shard, *flags])
        return int(main_of("prepare")() or 0)


def merge_command(*words: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["data", "merge", *words])
        return int(main_of("data")() or 0)


SHARD = "out.shard-0000{}-of-00004"


def _lose(folder: Path, tokenizer: Tokenizer) -> None:
    for path in folder.glob(SHARD.format(2) + ".*"):
        path.unlink()


def _stop(folder: Path, tokenizer: Tokenizer) -> None:
    _lose(folder, tokenizer)
    (folder / f"{SHARD.format(2)}.partial").mkdir()


def _damage(ending: str) -> Any:
    def damage(folder: Path, tokenizer: Tokenizer) -> None:
        path = folder / f"{SHARD.format(2)}.{ending}"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return damage


def _cut(ending: str) -> Any:
    def cut(folder: Path, tokenizer: Tokenizer) -> None:
        path = folder / f"{SHARD.format(2)}.{ending}"
        os.truncate(path, path.stat().st_size - 1)
    return cut


def _edit(folder: Path, tokenizer: Tokenizer) -> None:
    path = folder / f"{SHARD.format(2)}.shard.json"
    path.write_text(path.read_text().replace('"skip_errors": false', '"skip_errors": 0'))


def _other_settings(folder: Path, tokenizer: Tokenizer) -> None:
    command(folder, tokenizer, "2/4", "--overwrite", "--deduplicate")


def _other_inputs(folder: Path, tokenizer: Tokenizer) -> None:
    os.utime(folder / "b.jsonl", ns=(5, 5))
    command(folder, tokenizer, "2/4", "--overwrite")


def _swap(folder: Path, tokenizer: Tokenizer) -> None:
    for path in folder.glob(SHARD.format(1) + ".*"):
        shutil.copy(path, folder / path.name.replace(SHARD.format(1), SHARD.format(2)))


AGAIN = r"`ds-pretrain prepare '.*/\*.jsonl' --tokenizer \S+ --out \S+/out --shard 2/4"


@pytest.mark.parametrize(("break_shard", "message"), [
    (_lose, rf"1 shard of 4: shard 2/4: it does not exist. Run {AGAIN}`"),
    (_stop, rf"1 shard of 4: shard 2/4: it is not complete: it was stopped, or is being made. Run {AGAIN}`"),
    (_damage("bin"), rf"1 shard of 4: shard 2/4: .*00002-of-00004.bin is damaged in block 0.*Run {AGAIN} --overwrite`"),
    (_damage("idx"), rf"shard 2/4: .*00004.idx is damaged: it has another SHA-256.*Run {AGAIN} --overwrite`"),
    (_damage("documents"), rf"shard 2/4: .*00004.documents is damaged.*Run {AGAIN} --overwrite`"),
    (_damage("sha256.json"), rf"shard 2/4: a file of .*-00002-of-00004 is damaged.*Run {AGAIN} --overwrite`"),
    (_cut("bin"), rf"shard 2/4: .*00004.bin has \d+ bytes, and \d+ were written.*Run {AGAIN} --overwrite`"),
    (_damage("shard.json"), rf"shard 2/4: .*00004.shard.json: .*Run {AGAIN} --overwrite`"),
    (_edit, rf"shard 2/4: .*00004.shard.json: its content does not match the SHA-256 in it. Run {AGAIN} --overwrite`"),
    (_cut("shard.json"), rf"shard 2/4: .*00004.shard.json: .*Run {AGAIN} --overwrite`"),
    (_swap, rf"shard 2/4: .*00002-of-00004.shard.json is of shard 1/4. Run {AGAIN} --overwrite`"),
    (_other_settings, rf"00002-of-00004: it was not made as .*00000-of-00004 was; different: --deduplicate. "
                      rf"If the other one is right, run {AGAIN} --overwrite`"),
    (_other_inputs, rf"00002-of-00004: it was not made as .*; different: \S+b.jsonl. .*run {AGAIN} --overwrite`"),
])
def test_a_shard_that_cannot_be_merged_is_named_and_made_again(
        tmp_path: Path, complete: Path, tokenizer: Tokenizer, break_shard: Any, message: str) -> None:
    """Afterwards the command in the message is run, and the merge succeeds."""
    folder = tmp_path / "copy"
    shutil.copytree(complete, folder)  # copies the times, too
    inputs = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    for index in range(4):  # the inputs have other paths
        command(folder, tokenizer, f"{index}/4", "--overwrite")
    break_shard(folder, tokenizer)
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=message) as error:
        merge_command(str(folder / "out"))
    assert sorted(folder.iterdir()) == before
    for path, time in inputs.items():
        os.utime(path, ns=(time, time))
    assert ("--overwrite`" in str(error.value)) == (folder / f"{SHARD.format(2)}.idx").exists()
    command(folder, tokenizer, "2/4", *["--overwrite"] * ("--overwrite`" in str(error.value)))
    assert merge_command(str(folder / "out")) == 0
    single([str(folder / "*.jsonl")], tokenizer, tmp_path / "single", PrepareSettings())
    assert content(folder / "out") == content(tmp_path / "single")


def test_the_commands(tmp_path: Path, complete: Path, tokenizer: Tokenizer,
                      capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(complete / SHARD.format(index)) for index in range(4)]
    assert command(complete, tokenizer, "1/4") == 0  # it is complete
    captured = capsys.readouterr()
    assert "00001-of-00004 is complete already" in captured.err
    assert captured.out.splitlines()[-1] == f"next: ds-pretrain data merge {complete}/out"
    summary = complete / f"{SHARD.format(1)}.summary.json"
    for content_now in (b"{", None):  # damaged, missing
        summary.unlink() if content_now is None else summary.write_bytes(content_now)
        with pytest.raises(ConfigError, match=r"00001-of-00004\.bin exists. Give --overwrite"):
            command(complete, tokenizer, "1/4")
    assert command(complete, tokenizer, "1/4", "--overwrite") == 0
    assert merge_command(str(tmp_path / "named"), *reversed(names)) == 0  # any order, another OUT
    single([str(complete / "*.jsonl")], tokenizer, tmp_path / "single", PrepareSettings())
    assert content(tmp_path / "named") == content(tmp_path / "single")
    assert sum(json.loads(Path(f"{name}.summary.json").read_text())["tokens"] for name in names) == json.loads(
        (tmp_path / "named.summary.json").read_text())["tokens"]
    with pytest.raises(ConfigError, match=r"named\.bin exists. Give --overwrite"):
        merge_command(str(tmp_path / "named"), *names)
    with pytest.raises(ConfigError, match="shard 0/4 is given twice"):
        merge_command(str(tmp_path / "two"), names[0], *names)
    with pytest.raises(ConfigError, match=r"00001-of-00004: it is not named, and the other shards need it"):
        merge_command(str(tmp_path / "two"), names[0], names[2])
    for index in (0, 2):
        for path in complete.glob(f"{SHARD.format(index)}.*"):
            shutil.copy(path, tmp_path)
    with pytest.raises(ConfigError, match=r"2 shards of 4: shard 1/4: it does not exist; shard 3/4: .* --shard 1/4`, "
                                          r"and the same with --shard 3/4"):
        merge_command(str(tmp_path / "out"))
    for path in tmp_path.glob(f"{SHARD.format(2)}.*"):
        shutil.copy(path, tmp_path / path.name.replace("of-00004", "of-00005"))
    with pytest.raises(ConfigError, match=r"there are shards of 4 and of 5. Name the shards of one number"):
        merge_command(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="named: it is no shard of a preparation"):
        merge_command(str(tmp_path / "two"), names[0], str(tmp_path / "named"))
    with pytest.raises(ConfigError, match=r"nothing: there are no shards .*nothing.shard-\*"):
        merge_command(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"--shard 1/3: .*00000-of-00004.shard.json is one of 4 shards. Give"):
        command(complete, tokenizer, "1/3")
    with pytest.raises(ConfigError, match="--shard: standard input cannot be divided"):
        make(["-"], tokenizer, tmp_path / "stdin", PrepareSettings(), Shard(0, 2))
    with pytest.raises(ConfigError, match=r"--vocab_size: there is no tokenizer at .*/none, and each"):
        command(complete, tokenizer, "1/4", "--vocab_size=300", f"--tokenizer={tmp_path}/none")


@pytest.mark.parametrize(("word", "message"), [
    ("3/3", "there is no shard 3 of 3: the first is 0/3, and the last is 2/3"),
    ("-1/8", "found '-1/8'; expected i/n with i from 0 to n-1"), ("2/0", "found 0 shards; expected 1 to 99999"),
    ("0/100000", "found 100000 shards"), ("a/b", "found 'a/b'"), ("1", "found '1'"), ("1/2/3", "found '1/2/3'"),
    ("1.0/2", "found '1.0/2'"), ("٣/8", "found"), ("slurm", "SLURM_ARRAY_TASK_ID, _COUNT, _MIN and _MAX are not set"),
    ("slurm/x", "is no task of an array job")])
def test_wrong_shards(word: str, message: str) -> None:
    error = rejection(parse_shard, word, {})
    assert message in error
    assert error.startswith("--shard")


def test_the_task_of_a_slurm_array() -> None:
    def environ(task: int, count: int, first: int, last: int) -> dict[str, str]:
        values = {"ID": task, "COUNT": count, "MIN": first, "MAX": last}
        return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}

    assert parse_shard("slurm", environ(3, 8, 0, 7)) == Shard(3, 8)
    assert parse_shard("slurm", environ(3, 8, 1, 8)) == Shard(2, 8)
    assert parse_shard("slurm/8", environ(3, 2, 3, 5)) == Shard(3, 8)
    assert parse_shard("1/2", environ(3, 8, 0, 7)) == Shard(1, 2)  # the variables alone have no effect
    with pytest.raises(ConfigError, match=r"the array has 2 of the tasks 3 to 5. Give --shard slurm/n"):
        parse_shard("slurm", environ(3, 2, 3, 5))
    with pytest.raises(ConfigError, match="there is no shard 8 of 8"):
        parse_shard("slurm/8", environ(8, 8, 1, 8))
    with pytest.raises(ConfigError, match="found 'slurm/x'"):
        parse_shard("slurm/x", environ(8, 8, 1, 8))
