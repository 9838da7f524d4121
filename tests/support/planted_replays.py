"""Plant faults into training runs, question them by replays, and count the right verdicts, by kind and layout.

    python -m tests.support.planted_replays FOLDER [LAYOUT ...] [CASE ...]

In each layout one launch trains a tiny model of bytes on a blend of two sources, with a checkpoint. From this on, it
trains each case with a fault (tests/support/plants.py), and the replays. Replays are the same for all cases in which
nothing is wrong in the replay, so that they are trained once. Then the cases are questioned, and graded:

    right       the cause is named, and no other, with the rank, step, layer or document; or all that can be known is
                named, and the verdict says that it is unsure
    unsure      the verdict says so, and names the cause among others, although more can be known
    wrong       anything else

A fault that has changed nothing is an error: the exit code is 1. If FOLDER has all runs already, they are only
questioned again.
"""

import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.analysis.replay.documents import odd_documents, pieces_of
from pretrain.analysis.replay.order import SAMPLES_FILE, ReplayOrder
from pretrain.analysis.replay.question import Replay, question, read_replay
from pretrain.analysis.replay.target import find_target
from pretrain.data.data_spec import parse_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.errors import ConfigError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.cases import CPU, case, config, flags
from tests.support.launch import run_worker
from tests.support.planted_documents import (
    REMARKS,
    SEED,
    SEQ_LENGTH,
    VOCAB,
    made_text,
    other_tokenizer,
    plant,
    planted_tokens,
    write_documents,
)

TRAINED = 80  # steps of the common checkpoint: documents stand out for a trained model only
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, DeepSpeed JSON
    "zero1": (3, config(1, micro=3, accumulation=2, lr=3e-3)),
    "zero3_offload": (3, config(3, precision="bf16", micro=3, accumulation=2, lr=3e-3, offload_optimizer=CPU)),
    "pipeline": (4, config(1, precision="bf16", micro=2, accumulation=4, lr=3e-3, stages=2)),
    "tensor": (4, {**config(1, micro=4, accumulation=2, lr=3e-3), "tensor_parallel": {"autotp_size": 2}}),
}
BATCHES = {"zero1": 18, "zero3_offload": 18, "pipeline": 16, "tensor": 16}
_LIMIT_S = 4 * 3600.0
_AFTER = 3  # steps that each case trains after the checkpoint
_FEWEST_PLANTED = 40  # tokens of a planted document in a sample
_TENSOR_GROUPS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}  # ranks whose outputs are one sum
_PLAIN = "plain"  # the run without a fault
_TWICE = [{"name": "replay_1"}, {"name": "replay_2"}]
COLUMNS = ("right", "unsure", "unsure, cause not named", "wrong", "not planted")
# rows that are not among the 25 cases of a layout
SPARSE, HEALTHY = "beyond: fault in a step without checksums", "beyond: no fault"


@dataclass(frozen=True)
class Planted:
    """A case: a fault in the run, one in the replays, and the right verdict."""

    name: str
    group: str  # row of the table
    kind: str  # of the right verdict
    plant: dict[str, Any] | None = None
    rank: int | None = None  # that a right verdict names
    step: int | None = None  # as well
    layer: str | None = None
    unsure: bool = False  # no more can be known
    poison: str = ""  # kind of the planted document of step TRAINED + 1
    replays: Sequence[dict[str, Any]] = ()  # own ones: see replay_worker.py
    flags: dict[str, Any] = field(default_factory=dict)
    lr: float = 3e-3
    edit: str = ""  # how a file of the data is changed after the run: "cut" or "changed"
    note: str = ""  # a part of a note of a right answer


def planted_cases(layout: str, trained: int = TRAINED) -> list[Planted]:
    """Return the 25 cases of a layout; then 2 in steps without checksums, and the run without a fault."""
    ranks = LAYOUTS[layout][0]
    fault, later, last = trained + 2, trained + 3, ranks - 1

    def block(rank: int) -> str:
        return "3" if layout == "pipeline" and rank >= 2 else "2"

    def operator(rank: int, step: int = fault, **more: Any) -> dict[str, Any]:
        return {"kind": "operator", "rank": rank, "step": step, "name": block(rank), **more}

    def case_of(name: str, group: str, kind: str, values: dict[str, Any], layer: bool = True, **more: Any) -> Planted:
        rank = values.get("rank")
        more = {"plant": values, "rank": rank, "step": values["step"], **more}
        return Planted(name, group, kind, layer=block(rank or 0) if layer else None, **more)

    def weight(name: str, rank: int, bit: int, **more: Any) -> Planted:
        return case_of(name, more.pop("group", "bit flipped in a weight"), "memory_weights", {
            "kind": "weight", "rank": rank, "step": fault, "name": f"{block(rank)}.mlp.up.weight", "bit": bit}, **more)

    def state(name: str, rank: int, of: str, bit: int) -> Planted:
        return case_of(name, "bit flipped in an optimizer state", "memory_states", {
            "kind": "state", "rank": rank, "step": fault, "name": of, "bit": bit}, layer=False)

    def reduced(name: str, rank: int, bit: int, step: int = fault) -> Planted:
        return case_of(name, "bit flipped in a gradient during the reduction", "reduction", {
            "kind": "reduced", "rank": rank, "step": step, "bit": bit}, layer=False)

    def once(name: str, values: dict[str, Any], kind: str = "forward", **more: Any) -> Planted:
        return case_of(name, more.pop("group", "operator wrong once"), kind, values, **more)

    def lr(name: str, step: int, value: float) -> Planted:
        return case_of(name, "learning rate changed by hand", "settings_changed",
                       {"kind": "lr", "step": step, "value": value}, layer=False)

    plants = [operator(1, value=0.5), operator(1, value=0.7)]
    always, is_decided = operator(1, persistent=True), layout.startswith("zero")
    return [
        *(Planted(f"poison_{poison}", f"poisoned document: {REMARKS[poison]}", "reproducible", poison=poison,
                  replays=[{"name": "replay_1", "examine": True}, {"name": "cross", "cross_check": True}])
          for poison in REMARKS),
        weight("weight_high", 0, -4), weight("weight_low", last, 3), weight("weight_sign", 1, -1),
        state("state_first", 0, "exp_avg", 25), state("state_second", last, "exp_avg_sq", 20),
        state("state_low", 1, "exp_avg", 5),
        reduced("reduced_high", 0, -5), reduced("reduced_low", last, 2), reduced("reduced_sign", 1, -1, later),
        case_of("gradient", "bit flipped in a gradient before the reduction", "backward", {
            "kind": "gradient", "rank": 1, "step": fault, "name": f"{block(1)}.mlp.up.weight", "bit": 10}),
        once("operator_large", operator(0, value=3.0)), once("operator_small", operator(last, value=0.05)),
        once("operator_late", operator(1, later)),
        once("flaky", operator(1), group="operator wrong now and then",
             replays=[{"name": f"replay_{number}", "plant": each} for number, each in enumerate(plants, 1)]),
        once("always", always, "wrong_rank", group="operator always wrong", unsure=not is_decided, replays=[
            {"name": "replay_1", "plant": always}, {"name": "cross", "plant": always, "cross_check": True}]),
        once("was_always", operator(0, persistent=True), group="operator always wrong, on a host that is gone"),
        lr("lr_higher", fault, 3.0), lr("lr_little", later, 1.001),
        Planted("lr_of_start", "learning rate of the JSON changed between starts", "reproducible", lr=1e-3,
                flags={"override": "lr"}, note="from 0.003 to 0.001", replays=[
                    {"name": "replay_1"}, {"name": "cross", "cross_check": True}]),
        once("random", {"kind": "random", "rank": last, "step": fault}, "random_state", layer=False,
             group="a random number drawn"),
        Planted("truncated", "blend source cut after the run", "data_changed", edit="cut"),
        Planted("changed", "blend source changed on the disk after the run", "data_changed", edit="changed",
                replays=_TWICE),
        weight("sparse_weight", 1, -4, group=SPARSE, flags={"flight_interval": 10}, unsure=True),
        once("sparse_operator", operator(1), group=SPARSE, flags={"flight_interval": 10}, unsure=True),
        Planted(_PLAIN, HEALTHY, "reproducible", replays=[*_TWICE, {"name": "cross", "cross_check": True}]),
    ]


class PlantedData:
    """Data of the runs of a layout: a blend of the sources `clean` and `other`, and poisoned copies of `clean`."""

    def __init__(self, folder: Path, layout: str, trained: int) -> None:
        text = made_text()
        self.folder, self.tokenizer, self._text = folder, write_byte_tokenizer(folder), text
        self._steps = [range(first, first + BATCHES[layout]) for step in range(_AFTER)
                       for first in [(trained + step) * BATCHES[layout]]]
        self._random, self._other = np.random.default_rng(7), other_tokenizer(text)
        for name, part in (("clean", text), ("other", text[len(text) // 2:])):
            if not (folder / f"{name}.bin").is_file():
                write_documents(folder / name, part)

    def words(self, source: str = "clean") -> list[str]:
        return ["0.7", str(self.folder / source), "0.3", str(self.folder / "other")]

    def _open(self) -> RunData:
        return open_run_data(parse_data_spec(self.words(), split="1,0,0"), seq_length=SEQ_LENGTH, seed=SEED,
                             tokenizer=str(self.tokenizer), vocab_size=VOCAB)

    def poison(self, kind: str) -> int:
        """Copy the source `clean` to a source `kind` with a poisoned document. Returns its number.

        A sample of the first step after the checkpoint has many tokens of it.
        """
        source, document = self._document_of(0, "clean")
        if not (self.folder / f"{kind}.bin").is_file():
            tokens = planted_tokens(kind, self._text, self._other, np.random.default_rng(7))
            plant(source, self.folder / kind, document, tokens)
        return document

    @cached_property
    def change(self) -> dict[str, Any]:
        """A change of some bytes of the source `other` that the second step after the checkpoint reads."""
        source, document = self._document_of(1, "other")
        first = int(source.document_offsets(document, document + 1)[0])
        return {"file": str(self.folder / "other.bin"), "offset": 2 * first, "bytes": [65, 0] * _FEWEST_PLANTED}

    def _document_of(self, step: int, name: str) -> Any:
        """Return a source, and a document of it of which a sample of the step has many tokens."""
        dataset = self._open().datasets["train"]
        for sample in self._random.permutation(self._steps[step]).tolist():
            for piece in pieces_of(dataset, sample):
                bounds = piece.source.document_offsets().clip(piece.start, piece.start + piece.length)
                document = int(np.diff(bounds).argmax())
                if Path(piece.source.prefix).name == name and np.diff(bounds)[document] >= _FEWEST_PLANTED:
                    return piece.source, document
        raise AssertionError(f"no sample of the step has many tokens of a document of {name}")


def cases_of(layout: str, data: PlantedData, planted: list[Planted], trained: int) -> list[dict[str, Any]]:
    """Return the cases of replay_worker.py."""
    values = LAYOUTS[layout][1]
    common = {**flags("", steps=400), "split": "1,0,0", "seq_length": SEQ_LENGTH, "seed": SEED, "log_interval": 1,
              "tokenizer": str(data.tokenizer), "model_overrides": f"vocab_size={VOCAB},n_layer=2,n_embd=64",
              "flight_interval": 1, "eval_interval": 0, "replica_check_interval": 0, "max_bad_steps": 100,
              "step_timeout": 0, "first_step_timeout": 0, "save_interval": trained, "train_data": data.words()}
    last = trained + _AFTER
    found = [case("base", "train", values, {**common, "exit_step": trained})]
    plain = [each for each in planted if each.name == _PLAIN] or [Planted(_PLAIN, "", "reproducible", replays=_TWICE)]
    for each in [*plain, *(each for each in planted if each.name != _PLAIN)]:
        own = {**values, "optimizer": {**values["optimizer"],
                                       "params": {**values["optimizer"]["params"], "lr": each.lr}}}
        more = {"train_data": data.words(each.poison), "override": "data"} if each.poison else {}
        if not each.edit:
            found.append(case(each.name, "train", own, {**common, **each.flags, **more}, after="base",
                              plant=each.plant, last_step=last))
        if each.replays:
            found.append({"name": f"{each.name}_replays", "job": "replays", "run": f"run-{_run_of(each)}",
                          "step": _asked(each, trained), "edit": data.change if each.edit else None, "replays": [
                              {"folder": f"replays-{each.name}/{replay['name']}", **replay}
                              for replay in each.replays]})
    return found


def _run_of(planted: Planted) -> str:
    return _PLAIN if planted.edit else planted.name


def _asked(planted: Planted, trained: int) -> int:
    """Return the step that is questioned."""
    return trained + (1 if planted.poison else _AFTER)


def answer_of(folder: Path, planted: Planted, trained: int) -> dict[str, Any]:
    """Question a case. Returns the verdict, with `notes` and `documents`: the documents that stand out."""
    replays = folder / f"replays-{planted.name if planted.replays else _PLAIN}"

    def train(number: int, order: ReplayOrder) -> Replay:
        return read_replay(replays / ("cross" if order.cross_check else f"replay_{number}") / "run")

    try:
        target = find_target(folder / f"run-{_run_of(planted)}", _asked(planted, trained))
        found = question(target, train, repeats=2)
        documents = []
        if planted.poison:
            report = json.loads((replays / "replay_1" / "run" / SAMPLES_FILE).read_text())
            documents = [{"document": each.document, "prefix": each.prefix, "odd": each.odd,
                          "certainty": report["odd"][0]["certainty"]}
                         for each in odd_documents(open_data_of_step(target.run, target.start), report)]
    except ConfigError as error:
        return {"kind": "none", "certainty": "sure", "ranks": [], "error": str(error)}
    return {**found.verdict.to_json(), "notes": found.notes, "documents": documents}


@contextlib.contextmanager
def _edited(planted: Planted, data: PlantedData) -> Iterator[None]:
    """Change the data as a case wants it, for the time of the question."""
    path = data.folder / "other.bin"
    before, status = path.read_bytes(), path.stat()
    if planted.edit == "cut":
        path.write_bytes(before[:len(before) * 2 // 3])
    elif planted.edit:
        edit = data.change
        path.write_bytes(before[:edit["offset"]] + bytes(edit["bytes"]) + before[edit["offset"] + len(edit["bytes"]):])
    yield
    if planted.edit:
        path.write_bytes(before)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def grade(layout: str, planted: Planted, verdict: dict[str, Any]) -> str:
    """Return right, unsure or wrong: see above."""
    expected = {planted.rank} if planted.rank is None or layout != "tensor" else {*_TENSOR_GROUPS[planted.rank]}
    is_named = planted.rank is None or planted.rank in verdict["ranks"]
    if verdict["certainty"] == "unsure":
        kinds = {verdict["kind"], *verdict.get("also", [])}
        if planted.kind not in kinds or not is_named:
            return "unsure, cause not named"
        return "right" if planted.unsure else "unsure"
    is_right = (verdict["kind"] == planted.kind and is_named and not planted.unsure
                and (planted.rank is None or {*verdict["ranks"]} <= expected)
                and planted.step in (None, verdict["step"]) and planted.layer in (None, verdict["layer"])
                and any(planted.note in note for note in ["", *verdict["notes"]]))
    if is_right and planted.poison:
        if not verdict["documents"]:
            return "wrong"
        first = verdict["documents"][0]
        if first["certainty"] != "sure":
            return "unsure"
        is_right = Path(first["prefix"]).name == planted.poison and first["document"] == verdict["planted_document"]
    return "right" if is_right else "wrong"


def why_not_planted(layout: str, folder: Path, planted: Planted, acted: dict[str, list[str]], trained: int) -> str:
    """Return a reason if the fault has not changed the run, otherwise "".

    What a plant has changed it reports itself. The tokens that a step read are compared with those of the run without
    a fault.
    """
    ranks = {str(rank) for rank in range(LAYOUTS[layout][0])}
    if planted.plant is not None:
        wanted = ranks if planted.rank is None else {str(planted.rank)}
        return "" if {*acted} == wanted else f"the plant acted on the ranks {sorted(acted)}, not {sorted(wanted)}"
    if planted.poison or planted.edit == "changed":
        step = trained + (1 if planted.poison else 2)
        run = folder / (f"run-{planted.name}" if planted.poison else f"replays-{planted.name}/replay_1/run")
        tokens = [[record.rows[step]["tokens"] for _, record in sorted(read_replay(each).recorded.items())]
                  for each in (folder / f"run-{_PLAIN}", run)]
        return "" if tokens[0] != tokens[1] else f"step {step} has read the same tokens as without the fault"
    return ""


def run_planted(layout: str, folder: Path, planted: list[Planted], trained: int = TRAINED) -> dict[str, dict[str, Any]]:
    """Train and question the cases of a layout. Returns the answers by name, each with its `grade`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = PlantedData(folder, layout, trained)
    documents = {each.poison: data.poison(each.poison) for each in planted if each.poison}
    cases, path = cases_of(layout, data, planted, trained), folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    if not {each["name"] for each in cases} <= {*results}:
        results = run_worker("replay_worker.py", cases, LAYOUTS[layout][0], folder, timeout=_LIMIT_S)
    cpu_s = sum(result.get("cpu_s", 0.0) for result in results.values())
    print(f"{layout}: {len(planted)} cases, trained in {cpu_s:.0f} s of CPU")
    found = {}
    for each in planted:
        with _edited(each, data):
            answer = answer_of(folder, each, trained)
        answer |= {"planted_document": documents.get(each.poison), "replays": results.get(f"{each.name}_replays")}
        problem = why_not_planted(layout, folder, each, results.get(each.name, {}).get("acted", {}), trained)
        found[each.name] = {**answer, "problem": problem,
                            "grade": "not planted" if problem else grade(layout, each, answer)}
    return found


def main() -> int:
    folder, words = Path(sys.argv[1]).absolute(), sys.argv[2:]
    names = [word for word in words if word in LAYOUTS] or list(LAYOUTS)
    only = {*words} - {*LAYOUTS}
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for layout in names:
        began = time.monotonic()
        planted = [each for each in planted_cases(layout) if not only or each.name in only]
        answers = run_planted(layout, folder / layout, planted)
        (folder / f"{layout}.json").write_text(json.dumps(answers, indent=1))
        for each in planted:
            answer = answers[each.name]
            rows = [each.group] if each.group in (SPARSE, HEALTHY) else [each.group, f"layout {layout}", "all"]
            for row in rows:
                counts[row][answer["grade"]] += 1
            if answer["grade"] != "right":
                print(f"{layout} {each.name}: {answer['grade']}: {json.dumps(answer)}")
        print(f"{layout}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"| fault | {' | '.join(COLUMNS)} |\n| --- {'| --- ' * len(COLUMNS)}|")
    for group, found in counts.items():
        print(f"| {group} | {' | '.join(str(found[name]) for name in COLUMNS)} |")
    return int(counts["all"]["wrong"] + sum(found["not planted"] for found in counts.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
