"""Which samples of a step stand out: planted documents are named, and the examination changes no bit of the run."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.prepare.prepare import prepare
from pretrain.data.run_data import open_run_data
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.dataset import PADDING
from pretrain.data.samples.packed import PackedDocuments
from pretrain.data.samples.shuffled import ShuffledWindows
from pretrain.extensions.replay.documents import OddDocument, documents_of, odd_documents, pieces_of
from pretrain.extensions.replay.main import SampleAnswer
from pretrain.extensions.replay.samples import certainty, highest_losses, robust_z, sample_norms
from tests.data.counting import write_counting
from tests.data.prepare.helpers import jsonl
from tests.extensions.replay.planted_documents import KINDS, LAYOUTS, STEPS, VOCAB, made_text, run_planted
from tests.support.cases import DROPOUT
from tests.support.launch import PROGRAM, ROOT

SEQ_LENGTH = 12
_TIMES = ("time", "ms")


@pytest.mark.parametrize("kind", ["shuffled", "packed", "blend"])
def test_the_documents_of_a_sample(kind: str, tmp_path: Path) -> None:
    lengths = [3, 30, 7, 60, 5, 11, 25, 40]
    indexed = [write_counting(tmp_path / f"source{number}", lengths, first=number * 1000) for number in range(2)]
    made: dict[str, Any] = {
        "shuffled": ShuffledWindows(indexed[0], seq_length=SEQ_LENGTH, seed=1),
        "packed": PackedDocuments(indexed[0], seq_length=SEQ_LENGTH, seed=1)}
    dataset = made.get(kind) or BlendedSamples([ShuffledWindows(source, seq_length=SEQ_LENGTH, seed=1)
                                                for source in indexed], [1, 2])
    bounds = np.cumsum([0, *lengths])
    for sample in range(25):
        tokens = dataset.samples([sample])[0]
        tokens = tokens[tokens != PADDING]
        read = np.concatenate([piece.source.tokens(piece.start, piece.start + piece.length)
                               for piece in pieces_of(dataset, sample)])
        assert read.tolist() == tokens.tolist()
        documents = documents_of(dataset, sample, np.arange(1.0, SEQ_LENGTH + 1), 0.0)
        assert sum(document.excess for document in documents) == sum(range(1, len(tokens)))
        for document in documents:
            first = document.first_token + 1000 * document.prefix.endswith("source1")
            place = tokens.tolist().index(first)
            assert bounds[document.document] <= document.first_token < bounds[document.document + 1]
            assert tokens[place:place + document.tokens].tolist() == [*range(first, first + document.tokens)]
            assert document.document_tokens == lengths[document.document]
    assert "pieces" not in vars(indexed[0])


def test_the_input_of_a_document_and_what_is_odd_about_it(tmp_path: Path) -> None:
    """Documents that `ds-pretrain prepare` has read from two files: the file, the line, and the remarks."""
    texts = [text for text in made_text().split("\n\n") if len(text) >= 200][:160]
    texts[30], texts[150] = "=" * 300, "\u0007\ufffd\u0001a" * 90
    inputs = [jsonl(tmp_path / f"{half}.jsonl", texts[start:start + 100]) for half, start in (("a", 0), ("b", 100))]
    prepare(inputs, tokenizer="bytes", out=str(tmp_path / "data"), workers=1)
    data = open_run_data(parse_data_spec(str(tmp_path / "data"), split="1,0,0"), seq_length=64, seed=1,
                         tokenizer="bytes", vocab_size=320)
    bounds = data.datasets["train"].sources[0].document_offsets()
    expected = {30: ("a.jsonl, line 31,", "one token repeated: token 61 is 100% of its 300 tokens"),
                150: ("b.jsonl, line 51,", "bytes that are no text"), 140: ("b.jsonl, line 41,", "")}
    for document, (place, remark) in expected.items():
        sample = next(sample for sample in range(10**4) if any(
            bounds[document] <= piece.start and piece.start + piece.length < bounds[document + 1]
            for piece in pieces_of(data.datasets["train"], sample)))
        found, = odd_documents(data, {"odd": [{"id": sample, "token_losses": [9.0] * 64}], "usual_loss": 3.0})
        assert found.document == document
        assert place in found.position
        assert any(remark in line for line in found.odd) if remark else not found.odd


def test_samples_that_stand_out() -> None:
    usual = np.exp(np.random.default_rng(0).normal(1, 0.1, 200))
    values = robust_z(np.array([np.exp(1.0), np.exp(2.5), np.inf, np.nan, np.exp(0.0)]), usual)
    assert abs(values[0]) < 1
    assert 12 < values[1] < 18
    assert (values[2], np.isnan(values[3])) == (np.inf, True)
    assert [certainty(value, np.nan) for value in values.tolist()] == ["", "sure", "sure", "", ""]
    assert [certainty(np.nan, value) for value in (8.0, 10.0, 13.0, -90.0)] == ["", "unsure", "sure", ""]
    assert certainty(9.0, 9.0) == "sure"


@pytest.mark.parametrize("number", [33, 1024])
def test_halves_find_samples_with_large_gradients(number: int) -> None:
    """Gradients of random directions. Two samples have a usual loss and 60 times the gradient of the others."""
    random = np.random.default_rng(number)
    gradients = random.normal(size=(number, 50)) / np.sqrt(50)
    planted = random.choice(number, 2, replace=False).tolist()
    gradients[planted] *= 60
    passes = []

    def norm_of(samples: Sequence[int]) -> float:
        passes.append(len(samples))
        return float(np.linalg.norm(gradients[[*samples]].mean(0)))

    norms = sample_norms(np.zeros(number), np.linalg.norm(random.normal(size=(16, 50)), axis=1) / np.sqrt(50), norm_of)
    assert {sample for sample, norm in norms.items() if norm > 10} == {*planted}
    assert len(norms) == 3
    assert len(passes) <= 3 * (2 * math.ceil(math.log2(number)) + 1)
    assert sum(passes) <= 3 * 2.2 * number


def _recorded(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of the flight record about a step, of all ranks, without times."""
    rows = []
    for path in sorted((run / "flight").glob("start_*/rank_*.jsonl")):
        row = next(row for row in map(json.loads, path.read_text().splitlines()) if row.get("step") == step)
        rows.append({key: value for key, value in row.items() if key not in _TIMES})
    return rows


def _check_equal(folder: Path) -> None:
    """The step after an examination is that of a run without it, by each digest of each rank."""
    plain = _recorded(folder / "run-plain", STEPS + 1)
    assert plain
    assert "states_after" in plain[0]
    assert _recorded(folder / "run-0", STEPS + 1) == plain


def test_planted_documents_are_named_and_the_step_remains_the_same(tmp_path: Path) -> None:
    rows = run_planted(tmp_path, made_text(), ["zero1_dp2"], ["repeated", "healthy"],
                       model_overrides=f"vocab_size={VOCAB},n_layer=2,n_embd=64,{DROPOUT}")
    assert [row["answer"] for row in rows] == ["right", "right"], rows
    planted = rows[0]["report"]
    first = planted["odd"][0]
    assert first["id"] in planted["ids"]
    assert "one token repeated" in rows[0]["documents"][0].odd[0]
    assert str(first["id"]) in planted["skip"].split(",")
    assert planted["without_odd"][0] != planted["with_all"][0]
    healthy, documents = rows[1]["report"], rows[1]["documents"]
    assert healthy["odd"] == planted["highest"] == []
    losses = [each["loss"] for each in healthy["highest"]]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
    assert {each["id"] for each in healthy["highest"]} == {each.sample for each in documents} <= {*healthy["ids"]}
    assert planted["without_odd"][0][1] < planted["with_all"][0][1], "the gradient without the sample is smaller"
    assert max(norm / usual for norm, usual in planted["layers"].values()) > 1
    _check_equal(tmp_path / "zero1_dp2")


@pytest.mark.slow
def test_planted_documents_in_all_layouts(tmp_path: Path) -> None:
    rows = run_planted(tmp_path, made_text(), [*LAYOUTS], [*KINDS, *KINDS, "healthy"])
    answers = [row["answer"] for row in rows]
    assert "wrong" not in answers
    assert answers.count("right") >= 0.95 * len(answers)
    for layout in LAYOUTS:
        _check_equal(tmp_path / layout)


def test_an_answer_has_80_columns() -> None:
    """Also with characters that are two columns wide; the command is one line."""
    report = {"step": 93, "ids": [*range(16)], "usual_loss": 2.6, "usual_sample_norm": 1.6, "layers": {"3": [4.0, 1.0]},
              "odd": [{"id": 7, "loss": 10.5, "grad_norm": 17.1, "certainty": "sure"}], "tensors": {"3.w": [8.0, 1.0]},
              "with_all": [[3.04, 1.2]], "without_odd": [[2.56, 0.5]]}
    document = OddDocument(7, 300, "/data/" + "c" * 40, 515_614, 129, 2101, 10.5, 1015.5, ["odd " * 40], "\u5f32" * 160)
    *lines, command = SampleAnswer(report, [document], "ds-pretrain " + "--flag " * 20).lines()
    assert max(len(line) + line.count("\u5f32") for line in lines) <= 80 < len(command)
    assert lines[0] == "samples:  1 of 16 samples of step 93 stands out"
    assert lines[1].startswith("  sample 7: ")
    assert lines[2].startswith("    document 300 of ")


def test_the_highest_losses_are_shown_where_none_stands_out() -> None:
    assert highest_losses(np.array([2.0, np.nan, 5.0, 5.0, 1.0, np.inf])) == [5, 2, 3]
    assert highest_losses(np.array([np.nan, 3.0])) == [1]
    sample = {"id": 7, "loss": 3.1, "grad_norm": 1.5, "certainty": ""}
    report = {"step": 93, "ids": [*range(64)], "usual_loss": 2.6, "usual_sample_norm": 1.6, "odd": [],
              "highest": [sample, {**sample, "id": 9, "loss": 3.0, "grad_norm": math.nan}]}
    document = OddDocument(9, 300, "/data/c", 515_614, 129, 2101, 10.5, 1015.5, [], "a text")
    lines = SampleAnswer(report, [document], "").lines()
    assert " ".join(" ".join(lines[:3]).split()) == (
        "samples: none of the 64 samples of step 93 stands out from those of the neighbouring steps, by loss or "
        "gradient norm; the highest losses are sample 7: loss 3.100 (usual 2.600), gradient norm 1.5 (usual 1.6)")
    assert lines[3] == "  sample 9: loss 3.000 (usual 2.600)"
    assert lines[4].startswith("    document 300 of ")
    assert lines[-1] == "    'a text'"


@pytest.mark.slow
def test_the_command_proposes_a_branch_that_works(tmp_path: Path) -> None:
    """A run that trains on a planted document: `ds-pretrain replay` names it, and the proposed branch leaves it out."""
    rows = run_planted(tmp_path, made_text(), ["zero1_dp2"], ["binary"])
    run = Path(rows[0]["run"])  # a branch of the checkpoint before the step
    done = subprocess.run([sys.executable, PROGRAM, "replay", f"{run}@{STEPS + 1}"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"document {rows[0]['document']} of {rows[0]['prefix']}" in " ".join(done.stdout.split())
    assert "bytes that are no text" in done.stdout
    command = shlex.split(next(line for line in done.stdout.splitlines() if line.startswith("ds-pretrain ")))
    assert command[command.index("--skip_samples") + 1] == rows[0]["report"]["skip"]
    branch = subprocess.run([sys.executable, "-m", "pretrain", *command[1:], "--exit_step", str(STEPS + 2)],
                            capture_output=True, text=True, cwd=ROOT)
    assert branch.returncode == 0, branch.stdout + branch.stderr
    without = json.loads((run / "replays" / f"step_{STEPS + 1}" / "verdict.json").read_text())["samples"]["without_odd"]
    trained = [row["loss"] for row in map(json.loads, (Path(command[command.index("--save") + 1]) / "metrics.jsonl")
                                          .read_text().splitlines()) if "grad_norm" in row]
    assert trained == pytest.approx([loss for loss, _ in without[:2]], rel=1e-6)
