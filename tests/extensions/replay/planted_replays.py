"""Plant faults into training runs, examine them by replays, and count the right results, by kind and layout.

    python -m tests.extensions.replay.planted_replays FOLDER [LAYOUT ...] [CASE ...]

In each layout one launch trains a tiny model of bytes on a blend of two sources, with a checkpoint. From this on, it
trains each case with a fault (plants.py), and the replays. Replays are the same for all cases in which
nothing is wrong in the replay, so that they are trained once. Then the cases are examined, and graded:

    right       the cause is named, and no other, with the rank, step, layer or document; or all that can be known is
                named, and the result says that it is unsure
    unsure      the result says so, and names the cause among others, although more can be known
    wrong       anything else

A fault that has changed nothing is wrong, too. The exit code is 1 if there is a wrong answer. If FOLDER has all runs
already, they are only questioned again.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.data.data_spec import parse_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.errors import ConfigError
from pretrain.extensions.replay.documents import odd_documents, pieces_of
from pretrain.extensions.replay.examine_step import Replay, examine, read_replay
from pretrain.extensions.replay.extension import SAMPLES_FILE, ReplayOrder
from pretrain.extensions.replay.target import find_target
from tests.extensions.replay import WORKERS
from tests.extensions.replay.planted_cases import (
    BATCHES,
    HEALTHY,
    LAYOUTS,
    PLAIN,
    SPARSE,
    TRAINED,
    TWICE,
    Planted,
    planted_cases,
)
from tests.extensions.replay.planted_documents import (
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
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.cases import case, flags
from tests.support.launch import PROGRAM, run_worker

_LIMIT_S = 4 * 3600.0
_AFTER = 3  # steps that each case trains after the checkpoint
_FEWEST_PLANTED = 40  # tokens of a planted document in a sample
_TENSOR_GROUPS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}  # ranks whose outputs are one sum
GRADES, ALL = ("right", "unsure", "wrong"), "all"


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
    def change(self) -> tuple[int, bytes]:
        """A change of the source `other`, which the second step after the checkpoint reads: first byte, new bytes."""
        source, document = self._document_of(1, "other")
        return 2 * int(source.document_offset(document)), bytes([65, 0] * _FEWEST_PLANTED)

    def _document_of(self, step: int, name: str) -> Any:
        """Return a source, and a document of it of which a sample of the step has many tokens."""
        dataset = self._open().datasets["train"]
        for sample in self._random.permutation(self._steps[step]).tolist():
            for piece in pieces_of(dataset, sample):
                bounds = piece.source.document_offsets().clip(piece.start, piece.start + piece.length)
                document = int(np.diff(bounds).argmax())
                if Path(str(piece.source.prefix)).name == name and np.diff(bounds)[document] >= _FEWEST_PLANTED:
                    return piece.source, document
        raise AssertionError(f"no sample of the step has many tokens of a document of {name}")


def cases_of(layout: str, data: PlantedData, planted: list[Planted], trained: int) -> list[dict[str, Any]]:
    """Return the cases of replay_worker.py."""
    values = LAYOUTS[layout][1]
    common = {**flags("", steps=400), "split": "1,0,0", "seq_length": SEQ_LENGTH, "seed": SEED, "log_interval": 1,
              "tokenizer": str(data.tokenizer), "model_overrides": f"vocab_size={VOCAB},n_layer=2,n_embd=64",
              "flight_interval": 1, "eval_interval": 0, "replica_check_interval": 0, "max_bad_steps": 100,
              "step_timeout": 0, "first_step_timeout": 0, "save_interval": 0, "train_data": data.words()}
    last = trained + _AFTER
    found = [case("base", "train", values, {**common, "exit_step": trained})]
    plain = [each for each in planted if each.name == PLAIN] or [Planted(PLAIN, "", "reproducible", replays=TWICE)]
    for each in [*plain, *(each for each in planted if each.name != PLAIN)]:
        own = {**values, "optimizer": {**values["optimizer"],
                                       "params": {**values["optimizer"]["params"], "lr": each.lr}}}
        more = {"train_data": data.words(each.poison), "override": "data"} if each.poison else {}
        if not each.edit:
            found.append(case(each.name, "train", own, {**common, **each.flags, **more}, after="base",
                              plant=each.plant, last_step=last))
        if each.replays:
            found.append({"name": f"{each.name}_replays", "job": "replays", "run": f"run-{_run_of(each)}",
                          "step": _asked(each, trained), "replays": [
                              {"folder": f"replays-{each.name}/{replay['name']}", **replay}
                              for replay in each.replays]})
    return found


def _run_of(planted: Planted) -> str:
    return PLAIN if planted.edit else planted.name


def _asked(planted: Planted, trained: int) -> int:
    """Return the step that is examined."""
    return trained + (1 if planted.poison else _AFTER)


def answer_of(folder: Path, planted: Planted, trained: int) -> dict[str, Any]:
    """Examine a case. Returns the result, with `notes` and `documents`: the documents that stand out."""
    replays = folder / f"replays-{planted.name if planted.replays else PLAIN}"

    def train(number: int, order: ReplayOrder) -> Replay:
        return read_replay(replays / ("cross" if order.cross_check else f"replay_{number}") / "run")

    try:
        target = find_target(folder / f"run-{_run_of(planted)}", _asked(planted, trained))
        found = examine(target, train, repeats=2)
        documents = []
        if planted.poison:
            report = json.loads((replays / "replay_1" / "run" / SAMPLES_FILE).read_text())
            documents = [{"document": each.document, "prefix": each.prefix, "odd": each.odd,
                          "certainty": odd["certainty"]} for odd in report["odd"][:1]
                         for each in odd_documents(open_data_of_step(target.run, target.start), report)]
    except ConfigError as error:
        return {"kind": "none", "certainty": "sure", "ranks": [], "error": str(error)}
    return {**found.result.to_json(), "notes": found.notes, "documents": documents}


def answer_of_command(folder: Path, planted: Planted, trained: int) -> dict[str, Any]:
    """Examine a case with `ds-pretrain replay`, which trains the replays itself. Returns the same as `answer_of`."""
    output = folder / f"command-{planted.name}"
    done = subprocess.run([sys.executable, PROGRAM, "replay", "--output", str(output),
                           f"{folder}/run-{_run_of(planted)}@{_asked(planted, trained)}"], capture_output=True,
                          text=True, check=False)
    (folder / f"command-{planted.name}.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        return {"kind": "none", "certainty": "sure", "ranks": [], "error": done.stderr}
    found = json.loads((output / "verdict.json").read_text())
    samples = found["samples"] or {"odd": [], "documents": []}
    documents = [{**each, "certainty": odd["certainty"]} for odd in samples["odd"][:1] for each in samples["documents"]]
    return {**found["verdict"], "notes": found["notes"], "documents": documents}


@contextlib.contextmanager
def _edited(planted: Planted, data: PlantedData) -> Iterator[None]:
    """Change the data as a case wants it, for the time of the examination."""
    path = data.folder / "other.bin"
    before, status = path.read_bytes(), path.stat()
    if planted.edit == "cut":
        path.write_bytes(before[:len(before) * 2 // 3])
    elif planted.edit:
        first, new = data.change
        assert before[first:first + len(new)] != new
        path.write_bytes(before[:first] + new + before[first + len(new):])
    yield
    if planted.edit:
        path.write_bytes(before)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def grade(layout: str, planted: Planted, result: dict[str, Any]) -> str:
    """Return right, unsure or wrong: see above."""
    expected = {planted.rank} if planted.rank is None or layout != "tensor" else {*_TENSOR_GROUPS[planted.rank]}
    is_named = planted.rank is None or planted.rank in result["ranks"]
    if result["certainty"] == "unsure":
        kinds = {result["kind"], *result.get("also", [])}
        if planted.kind not in kinds or not is_named:
            return "unsure, cause not named"
        return "right" if planted.unsure else "unsure"
    is_right = (result["kind"] == planted.kind and is_named and not planted.unsure
                and (planted.rank is None or {*result["ranks"]} <= expected)
                and planted.step in (None, result["step"]) and planted.layer in (None, result["layer"])
                and planted.operator == result["operator"]
                and any(planted.note in note for note in ["", *result["notes"]]))
    if is_right and planted.poison:
        if not result["documents"]:
            return "wrong"
        first = result["documents"][0]
        if first["certainty"] != "sure":
            return "unsure"
        is_right = Path(first["prefix"]).name == planted.poison and first["document"] == result["planted_document"]
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
    if planted.poison:
        tokens = [[record.rows[trained + 1]["tokens"] for _, record in sorted(read_replay(run).recorded.items())]
                  for run in (folder / f"run-{PLAIN}", folder / f"run-{planted.name}")]
        return "" if tokens[0] != tokens[1] else "the step has read the same tokens as without the document"
    return ""


def run_planted(layout: str, folder: Path, planted: list[Planted], trained: int = TRAINED, *,
                by_command: bool = False) -> dict[str, dict[str, Any]]:
    """Train and examine the cases of a layout. Returns the answers by name, each with its `grade`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = PlantedData(folder, layout, trained)
    documents = {each.poison: data.poison(each.poison) for each in planted if each.poison}
    cases, path = cases_of(layout, data, planted, trained), folder / "results.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    if not {each["name"] for each in cases} <= {*results}:
        results = run_worker(str(WORKERS / "replay_worker.py"), cases, LAYOUTS[layout][0], folder, timeout=_LIMIT_S)
    cpu_s = sum(result.get("cpu_s", 0.0) for result in results.values())
    print(f"{layout}: {len(planted)} cases, trained in {cpu_s:.0f} s of CPU")
    found = dict[str, dict[str, Any]]()
    for each in planted:
        with _edited(each, data):
            # the ranks of a replay compare the hashes of the data themselves
            is_command = by_command or each.edit == "changed"
            answer = (answer_of_command if is_command else answer_of)(folder, each, trained)
        remarks = [line for document in answer.get("documents", [])[:1] for line in document["odd"]]
        answer |= {"is_kind_named": any(REMARKS.get(each.poison, "?") in line for line in remarks)}
        answer |= {"planted_document": documents.get(each.poison), "replays": results.get(f"{each.name}_replays")}
        problem = why_not_planted(layout, folder, each, results.get(each.name, {}).get("acted", {}), trained)
        found[each.name] = {**answer, "problem": problem,
                            "grade": "not planted" if problem else grade(layout, each, answer)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*", metavar="LAYOUT or CASE", choices=[
        [], *LAYOUTS, *(each.name for each in planted_cases("zero1"))])
    parser.add_argument("--command", action="store_true", help="question the runs by `ds-pretrain replay`, which "
                        "launches ranks of its own; not for faults in the replays")
    args = parser.parse_args()
    folder, names = args.folder.absolute(), [word for word in args.words if word in LAYOUTS] or list(LAYOUTS)
    only = {*args.words} - {*LAYOUTS}
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))  # by row and layout
    for layout in names:
        began = time.monotonic()
        planted = [each for each in planted_cases(layout) if not only or each.name in only]
        answers = run_planted(layout, folder / layout, planted, by_command=args.command)
        (folder / f"{layout}{'-command' * args.command}.json").write_text(json.dumps(answers, indent=1))
        for each in planted:
            found = answers[each.name]["grade"]
            for row in [each.group] if each.group in (SPARSE, HEALTHY) else [each.group, ALL]:
                counts[row][layout][found if found in GRADES else GRADES[-1]] += 1
            if found != "right":
                print(f"{layout} {each.name}: {found}: {json.dumps(answers[each.name])}")
        print(f"{layout}: {time.monotonic() - began:.0f} s; what is odd about the document is named in "
              f"{sum(answer['is_kind_named'] for answer in answers.values())} of "
              f"{sum(bool(each.poison) for each in planted)} cases", flush=True)
    print(f"| {' / '.join(GRADES)} | {' | '.join(names)} |\n| --- {'| --- ' * len(names)}|")
    for row, by_layout in sorted(counts.items(), key=lambda each: each[0] == ALL):
        cells = [" / ".join(str(by_layout[layout][each]) for each in GRADES) for layout in names]
        print(f"| {row} | {' | '.join(cells)} |")
    return int(any(found["wrong"] for by_layout in counts.values() for found in by_layout.values()))


if __name__ == "__main__":
    sys.exit(main())
