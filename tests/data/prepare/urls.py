"""The same documents in every format, in a folder that tests serve in several ways."""

import gzip
import hashlib
import json
import random
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet

from pretrain.data.prepare.prepare import PrepareSettings, prepare
from pretrain.data.text_inputs.chunk import ReadSettings

FORMATS = ("a.txt", "b.jsonl", "c.jsonl.gz", "d.jsonl.zst", "e.parquet")
SIDE_FILES = (".hidden", "_SUCCESS", "x/.y/z.txt")
SEPARATED = PrepareSettings(ReadSettings(document_separator="\n\n"))


def write_corpus(folder: Path, num_documents: int = 400, seed: int = 0) -> Path:
    """Write each format, the text one folder deeper, and files that are not read."""
    generator = random.Random(seed)
    texts = [f"{number} " + "".join(generator.choice("abcdefghij \n") for _ in range(generator.randrange(900))).strip()
             for number in range(num_documents)]
    texts = [text.replace("\n\n", "\n") for text in texts]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    for name in ("x/.y", "z"):
        (folder / name).mkdir(parents=True)
    (folder / "z" / "a.txt").write_text("\n\n".join(texts))
    (folder / "b.jsonl").write_bytes(lines)
    half = len(lines) // 2
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines[:half]) + gzip.compress(lines[half:]))
    (folder / "d.jsonl.zst").write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    other = [generator.randbytes(600) for _ in texts]
    pyarrow.parquet.write_table(pyarrow.table({"other": other, "text": texts}), folder / "e.parquet",
                                row_group_size=num_documents // 8)
    for name in SIDE_FILES:
        (folder / name).write_bytes(b"not read")
    return folder


def put_folder(folder: Path, url: str) -> None:
    """Copy a folder into a store."""
    system, path = fsspec.url_to_fs(url)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            system.pipe_file(f"{path}/{file.relative_to(folder)}", file.read_bytes())


def name_in(folder_or_url: object, name: str) -> str:
    return f"{folder_or_url}/{'z/' * (name == 'a.txt')}{name}"


def hashes(out: Path) -> tuple[str, str]:
    """Return the SHA-256 of the .bin and of the .idx."""
    first, second = (hashlib.sha256(Path(f"{out}.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx"))
    return first, second


def prepared(inputs: list[str], out: Path) -> tuple[str, str]:
    """Prepare inputs in this process, and return the hashes of the result."""
    other = (".gz", ".zst", ".jsonl", ".jsonl*", ".parquet")
    has_text = any(not word.partition("?")[0].endswith(other) for word in inputs)
    settings = SEPARATED if has_text else None
    prepare(inputs, tokenizer="bytes", out=str(out), settings=settings, workers=1, overwrite=True)
    return hashes(out)
