"""Documents that are planted into the data of a trained model, and how many of them the examination of a step names.

    python -m tests.extensions.replay.planted_documents [--text FILE] [--cases N] [--layouts NAME ...]

In each layout a tiny model of bytes is trained on a text. Then one document of the next step is replaced: by one token
repeated, by random bytes, or by text that another tokenizer has encoded; or the step remains as it is. The samples of
this step are examined. An answer is right if it is sure and names the planted document first, or says of an unchanged
step that no sample stands out; it is unsure if it says so; otherwise it is wrong.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pretrain.data.data_spec import parse_data_spec
from pretrain.data.run_data import RunData, open_run_data
from pretrain.data.samples.dataset import SampleDataset
from pretrain.data.token_files.indexed_dataset import IndexedDataset
from pretrain.data.token_files.writer import IndexedWriter
from pretrain.extensions.replay.documents import odd_documents, pieces_of
from tests.extensions.replay import WORKERS
from tests.support.byte_tokenizer import EOD, write_byte_tokenizer
from tests.support.cases import CPU, config, flags
from tests.support.launch import run_worker

SEED, SEQ_LENGTH, BATCH, STEPS, VOCAB = 1234, 128, 16, 80, 320
KINDS = ("repeated", "binary", "tokenizer", "healthy")
REMARKS = {"repeated": "one token repeated", "binary": "random bytes", "tokenizer": "text of another tokenizer"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1_dp2": (2, config(1, micro=4, accumulation=2, lr=3e-3)),
    "zero3_offload_dp2": (2, config(3, micro=4, accumulation=2, lr=3e-3, offload_optimizer=CPU, offload_param=CPU)),
    "tensor2": (2, {**config(1, micro=4, accumulation=4, lr=3e-3), "tensor_parallel": {"autotp_size": 2}}),
    "pipeline2_dp2": (4, config(1, micro=4, accumulation=2, lr=3e-3, stages=2))}
_SHORTEST_DOCUMENT = 300  # bytes
_FEWEST_PLANTED = 40  # tokens of the planted document in the sample


def made_text() -> str:
    """Return 400 kB of paragraphs of sentences of 400 words, the same ones on each machine and at any time."""
    random = np.random.RandomState(0)  # NumPy guarantees its numbers
    syllables = [first + vowel + last for first in "bdfgklmnprst" for vowel in "aeiou" for last in ("", "n", "r", "s")]
    words = ["".join(random.choice(syllables, size)) for size in random.randint(1, 4, 400)]
    frequencies = 1 / np.arange(2, 402)
    paragraphs = []
    for _ in range(1200):
        sentences = [" ".join(random.choice(words, random.randint(4, 12), p=frequencies / frequencies.sum()))
                     for _ in range(random.randint(4, 9))]
        paragraphs.append(" ".join(sentence.capitalize() + "." for sentence in sentences))
    return "\n\n".join(paragraphs)


def write_documents(prefix: Path, text: str) -> None:
    """Write paragraphs of a text as documents of bytes, each with the end-of-document token."""
    documents, current = [], b""
    for paragraph in text.split("\n\n"):
        current += paragraph.encode() + b"\n\n"
        if len(current) >= _SHORTEST_DOCUMENT:
            documents.append(current)
            current = b""
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(np.array([*document, EOD], np.uint16))
        writer.finalize({"vocab_size": EOD + 1, "eod_token": EOD, "max_token": EOD})


def other_tokenizer(text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer, whose tokens are other numbers than the bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=EOD, show_progress=False))
    return tokenizer


def plant(source: IndexedDataset, prefix: Path, document: int, tokens: npt.NDArray[np.int64]) -> None:
    """Copy a data set, and replace the tokens of a document, except its end, by others of the same number."""
    for path in (source.bin_path, source.idx_path):
        shutil.copy(path, f"{prefix}{Path(path).suffix}")
    (prefix.parent / f"{prefix.name}.meta.json").write_text(json.dumps(
        {"vocab_size": EOD + 1, "eod_token": EOD, "max_token": EOD}))
    first, last = source.document_offsets(document, document + 1).tolist()
    with open(f"{prefix}.bin", "r+b") as file:
        file.seek(2 * first)
        file.write(np.resize(tokens, last - first - 1).astype("<u2").tobytes())


def choose(dataset: SampleDataset, random: np.random.Generator) -> int:
    """Return a document of which a sample of the step has many tokens."""
    source = dataset.sources[0]
    while True:
        piece, = pieces_of(dataset, STEPS * BATCH + int(random.integers(BATCH)))
        bounds = source.document_offsets().clip(piece.start, piece.start + piece.length)
        document = int(np.diff(bounds).argmax())
        if np.diff(bounds)[document] >= _FEWEST_PLANTED:
            return document


def planted_tokens(kind: str, text: str, tokenizer: Tokenizer, random: np.random.Generator) -> npt.NDArray[np.int64]:
    if kind == "repeated":
        return np.full(1, random.choice([*b" =-0axe"]))
    if kind == "binary":
        return random.integers(0, 256, 2000)
    start = int(random.integers(len(text) - 8000))
    return np.array(tokenizer.encode(text[start:start + 8000]).ids)


def open_data(prefix: Path, tokenizer: Path) -> RunData:
    return open_run_data(parse_data_spec(str(prefix), split="1,0,0"), seq_length=SEQ_LENGTH, seed=SEED,
                         tokenizer=str(tokenizer), vocab_size=VOCAB)


def run_planted(folder: Path, text: str, names: Sequence[str], kinds: Sequence[str], *,
                report: Callable[[list[dict[str, Any]]], None] = lambda rows: None, **more: Any
                ) -> list[dict[str, Any]]:
    """Train and examine a case of each kind in each layout. Returns a row for each: layout, kind, answer, ...

    A case "plain" trains the same steps as case 0, without the examination. `report` is called with the rows of each
    layout. `more`: further flags.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, other = write_byte_tokenizer(folder), other_tokenizer(text)
    write_documents(folder / "clean", text)
    data, random = open_data(folder / "clean", tokenizer), np.random.default_rng(7)
    rows: list[dict[str, Any]] = []
    for name in names:
        ranks, values = LAYOUTS[name]
        common = {**flags("", steps=400), "split": "1,0,0", "seq_length": SEQ_LENGTH, "seed": SEED, "log_interval": 1,
                  "tokenizer": str(tokenizer), "model_overrides": f"vocab_size={VOCAB},n_layer=2,n_embd=64",
                  "flight_interval": 1, **more}
        work = [{"name": "base", "config": values, "flags": {**common, "train_data": str(folder / "clean"),
                                                             "save_interval": STEPS, "exit_step": STEPS}}]
        own: list[dict[str, Any]] = []
        for number, kind in enumerate(kinds):
            prefix, document = folder / f"{name}-{number}", choose(data.datasets["train"], random)
            source, last_step = data.datasets["train"].sources[0], STEPS + 1
            if kind == "healthy":  # another step each time
                prefix, last_step = folder / "clean", STEPS + 1 + 3 * kinds[:number].count(kind)
            else:
                plant(source, prefix, document, planted_tokens(kind, text, other, random))
            own.append({"layout": name, "kind": kind, "document": document, "prefix": str(prefix), "step": last_step,
                        "run": str(folder / name / f"run-{number}")})
            work.append({"name": str(number), "config": values, "examine": True, "last_step": last_step, "flags": {
                **common, "train_data": str(prefix), "resume_from": f"{folder / name}/run-base@{STEPS}",
                **({} if kind == "healthy" else {"override": "data"})}})
        work.append({**work[1], "name": "plain", "examine": False})
        (folder / name).mkdir(exist_ok=True)
        results = run_worker(str(WORKERS / "examine_worker.py"), work, ranks, folder / name, timeout=3600)
        for number, row in enumerate(own):
            assert results[str(number)]["code"] == 0, results[str(number)]
            row["report"] = json.loads((Path(row["run"]) / "samples.json").read_text())
            row["documents"] = odd_documents(open_data(Path(row["prefix"]), tokenizer), row["report"])
            row["answer"] = answer(row)
            row["is_kind_named"] = any(REMARKS.get(row["kind"], "?") in line for document in row["documents"][:1]
                                       for line in document.odd)
        report(own)
        rows += own
    return rows


def answer(row: dict[str, Any]) -> str:
    """Return "right", "unsure" or "wrong"."""
    odd, documents = row["report"]["odd"], row["documents"]
    if not odd:
        return "right" if row["kind"] == "healthy" else "wrong"
    if odd[0]["certainty"] != "sure":
        return "unsure"
    return "right" if row["kind"] != "healthy" and documents[0].document == row["document"] else "wrong"


def main() -> None:
    """Print a line for each case, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="text file to train on (default: made-up sentences)")
    parser.add_argument("--cases", type=int, default=9, help="cases of each layout (default: 9)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    args = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="planted-documents-")), time.perf_counter()
    kinds = [KINDS[number % len(KINDS)] for number in range(args.cases)]
    rows = run_planted(folder, args.text.read_text() if args.text else made_text(), args.layouts, kinds,
                       report=_print_rows)
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        print(f"{kind:<10}", dict(Counter(row["answer"] for row in own)),
              f"what was planted is named in {sum(row['is_kind_named'] for row in own)}")
    print(dict(Counter(row["answer"] for row in rows)), f"of {len(rows)} cases; {time.perf_counter() - began:.0f} s")
    shutil.rmtree(folder)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        odd = row["report"]["odd"][:1]
        strongest = f"loss z {odd[0]['loss_z']:.1f}, gradient z {odd[0]['grad_z']:.1f}" if odd else "nothing"
        remarks = [line for each in row["documents"][:1] for line in each.odd]
        print(f"{row['layout']:<18} {row['kind']:<10} {row['answer']:<7} document {row['document']}: {strongest}; "
              f"{len(row['report']['odd'])} samples; {remarks}", flush=True)


if __name__ == "__main__":
    main()
