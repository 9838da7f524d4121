"""Blends that a resume accepts or rejects."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.load.start import Start
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.errors import ConfigError
from tests.checkpoint.starts import resumed, start_run, write_checkpoint
from tests.support.big_data import change_token

Starter = Callable[..., Start]
NAMES = ("web", "code", "books")


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    for number, name in enumerate((*NAMES, "other")):
        random = np.random.default_rng(number)
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for _ in range(20):
                writer.add_document(random.integers(0, 250, 100))
            writer.finalize({"vocab_size": 256, "max_token": 249, "eod_token": 0, "tokenizer_sha256": "ab" * 32})

    def start(*flags: str) -> Start:
        return start_run(tmp_path / "run", "--train_data", *train(5, 3, 2, at=tmp_path), "--seq_length", "16",
                         "--split", "80,20,0", *flags)

    return start


def train(*weights: float, at: Path, names: tuple[str, ...] = NAMES) -> list[str]:
    return [word for weight, name in zip(weights, names, strict=True) for word in (str(weight), str(at / name))]


def test_the_same_blend_resumes(start: Starter, tmp_path: Path) -> None:
    manifest = write_checkpoint(start().plan)
    assert manifest.data is not None
    assert [len(source["sha256"]) for source in manifest.data["sources"]] == [64] * 3
    for flags in ([], ["--train_data", *train(0.5, 0.3, 0.2, at=tmp_path)]):
        resume = resumed(start(*flags))
        assert (resume.warnings, resume.other_data) == ([], "")


@pytest.mark.parametrize(("weights", "names", "flags", "message"), [
    ((4, 4, 2), NAMES, (), r"global_step10 was trained with the weights 0.5, 0.3, 0.2, and this run would use 0.4, 0.4,"
                           r" 0.2 \(--blend_schedule 1280:W1,W2,... changes them from here on\)"),
    ((5, 2, 3), ("web", "books", "code"), (), "in the order web, code, books, and here web, books, code"),
    ((5, 5), ("web", "code"), (), "global_step10 was trained on web, code, books, and this run would train on web, "
                                  "code"),
    ((5, 3, 2), ("web", "code", "other"), (), "other is not the data that .*global_step10 was trained on .SHA-256"),
    ((5, 3, 2), NAMES, ("--split", "70,30,0"), "trained on tokens 0 to 1,600 of .*web, and this run .* 0 to 1,400"),
    ((5, 3, 2), NAMES, ("--blend_schedule", "1264:1,1,1"), r"0.5, 0.3, 0.2; from sample 79 on 0.3333"),
    ((1,), ("web",), (), "trained on web, code, books, and this run would train on one source"),
])
def test_another_blend_is_rejected(start: Starter, tmp_path: Path, weights: tuple[float, ...], names: tuple[str, ...],
                                   flags: tuple[str, ...], message: str) -> None:
    write_checkpoint(start().plan)
    words = ["--train_data", *train(*weights, at=tmp_path, names=names), *flags]
    with pytest.raises(ConfigError, match=message) as error:
        start(*words)
    assert str(error.value).startswith("--train_data ")
    resume = resumed(start(*words, "--allow_other_data"))
    assert "training continues at sample 80 of this data" in resume.other_data


def test_the_weights_may_change_after_the_checkpoint(start: Starter) -> None:
    write_checkpoint(start().plan)
    resume = resumed(start("--blend_schedule", "1280:1,1,0"))
    assert resume.other_data == ""
    [note] = resume.warnings
    assert note.endswith("0.5, 0.3, 0.2; this run continues with 0.5, 0.3, 0.2; from sample 80 on 0.5, 0.5, 0")


def test_phases_shorter_than_a_sample_are_rejected(start: Starter) -> None:
    with pytest.raises(ConfigError, match="--blend_schedule: two phases begin at sample 2"):
        start("--blend_schedule", "17:1,1,1", "32:1,2,1")


def test_a_changed_source_is_named(start: Starter, tmp_path: Path) -> None:
    write_checkpoint(start().plan)
    change_token(tmp_path / "code", keep_mtime=False, byte=500)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/code is not the data that .* was trained on .SHA-256"):
        start()


def test_sources_must_have_the_same_tokenizer(start: Starter, tmp_path: Path) -> None:
    meta = tmp_path / "books.meta.json"
    text = meta.read_text()
    meta.write_text(text.replace('"eod_token": 0', '"eod_token": 7'))
    with pytest.raises(ConfigError, match=rf"--train_data {tmp_path}/books: its end-of-document token is 7, and that of"
                                          rf" --train_data {tmp_path}/web is 0"):
        start()
    meta.write_text(text.replace("abab", "cdcd"))
    with pytest.raises(ConfigError, match="books: it was prepared with another tokenizer"):
        start()
    meta.write_text(text.replace('"eod_token": 0', '"eod_token": null'))
    assert [note for note in start().plan.notes if "its documents" in note] == [
        f"--train_data {tmp_path}/books: its documents end with no special token, and those of --train_data "
        f"{tmp_path}/web with token 0"]
    meta.write_text(text)
    shutil.copy(tmp_path / "web.bin", tmp_path / "code.bin")
    with open(tmp_path / "code.bin", "r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match=r"code\.bin: found 100 bytes \(truncated"):
        start()
