"""Wrong inputs of tools/evaluate.py: models, data, texts and tokenizers that do not fit together."""

import json
from collections.abc import Iterator

from tests.wrong_inputs.case import LONG, Case

_PROGRAM, _RUN = "tools/evaluate.py", "{world}/done"
_UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
               "long": "{world}/" + LONG, "proc": "/proc/self/none"}
_TEXTS = {"not UTF-8": ("in.txt", b"\xff\xfe\x00"), "cut gzip": ("in.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"),
          "no JSON": ("in.jsonl", b"text"),
          "empty": ("in.txt", b""), "no text": ("in.jsonl", b'{"text": ""}'), "no key": ("in.jsonl", b'{"txt": "a"}'),
          "list": ("in.jsonl", b'["a"]'), "surrogate": ("in.jsonl", b'{"text": "\\ud800"}')}


def evaluate_cases() -> Iterator[Case]:
    """Yield models, data and outputs that cannot be read, written or combined."""
    for what, path in {**_UNREADABLE, "file": "{world}/file"}.items():
        yield _case(f"model {what}", (path, "--data", "{world}/plain"), path.rsplit("/", 1)[1][:50])
    for what, path in _UNREADABLE.items():
        yield _case(f"--data {what}", (_RUN, "--data", path), "--data")
        yield _case(f"--tokenizer {what}", (_RUN, "--data", "{world}/plain", "--tokenizer", path), "--tokenizer")
    for what, path in {"under a file": "{world}/file/x", "folder": "{world}/nvme", "no folder": "{world}/none/x",
                       "proc": "/proc/x"}.items():
        yield _case(f"--json {what}", (_RUN, "--data", "{world}/plain", "--json", path), "--json")
    for what, (name, raw) in _TEXTS.items():
        yield _case(what, (_RUN, "--data", f"{{world}}/{name}"), name, (name, raw))
    for what, words, culprit in (
            ("step", ("--data", "{world}/plain", "--step", "7"), "--step 7: "),
            (".idx", ("--data", "{world}/plain.idx"), "without .idx"),
            ("truncated", ("--data", "{world}/truncated"), "truncated.bin"),
            ("corrupt", ("--data", "{world}/corrupt"), "corrupt.idx"),
            ("lonely", ("--data", "{world}/lonely"), "lonely.bin"),
            ("vocabulary", ("--data", "{world}/big"), "prepared with this model's tokenizer"),
            ("tokens", ("--data", "{world}/big_foreign"), "token 59999"),
            ("tokenizer of the data", ("--data", "{world}/corpus"), "abababababab"),
            ("second of two", ("--data", "{world}/plain", "{world}/none"), "none.idx"),
            ("seq_length", ("--data", "{world}/plain", "--seq_length", "1025"), "at most 1024, the positions"),
            ("stride", ("--data", "{world}/plain", "--seq_length", "32", "--stride", "33"), "at most --seq_length, 32"),
            ("mask of text", ("--data", "{world}/text.txt", "--eod_mask_loss"), "text.txt"),
            ("partition", ("--data", "{world}/plain", "--partition_weights"), "only one rank"),
            ("split", ("--split", "valid"), "--train_data"), ("no data", (), "--train_data")):
        yield _case(what, (_RUN, *words), culprit)
    yield from _task_cases()
    no_tokenizer = json.dumps([{"flags": {"tokenizer": None}, "train_steps": 5}]).encode()
    yield _case("no tokenizer", (_RUN, "--data", "{world}/text.txt"), "names no tokenizer",
                ("done/run.json", no_tokenizer))
    few = json.dumps({"version": "1.0", "added_tokens": [], "model": {
        "type": "WordLevel", "vocab": {f"w{number}": number for number in range(50_300)}, "unk_token": "w1"}}).encode()
    yield _case("large tokenizer", (_RUN, "--data", "{world}/text.txt", "--tokenizer", "{world}/large.json"),
                "its largest token is 50299", ("large.json", few))


def _task_cases() -> Iterator[Case]:
    """Yield wrong tasks. Only one case reads all task files of lm-eval, which takes seconds."""
    task = {"task": "own", "dataset_path": "json", "output_type": "multiple_choice", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": "/none/questions.jsonl"}}, "doc_to_text": "{{question}}"}
    good = ("tasks/own.yaml", json.dumps(task).encode())
    own = (_RUN, "--task_folder", "{world}/tasks", "--tasks")
    yield _case("unknown task", (*own, "own,onw"), 'Did you mean "own"', good)
    yield _case("task without data", (*own, "own"), "/none/questions.jsonl", good)
    yield _case("task file", (*own, "own"), "tasks/own.yaml", ("tasks/own.yaml", b"task: ["))
    yield _case("task list", (*own, "own"), "tasks/own.yaml", ("tasks/own.yaml", b"- task"))
    yield _case("no task file", (*own, "own"), "--task_folder", ("tasks/own.json", b"{}"))
    yield _case("task_folder missing", (_RUN, "--tasks", "own", "--task_folder", "{world}/none"), "--task_folder")
    for flag, value in (("--task_folder", "{world}/tasks"), ("--num_fewshot", "1"), ("--limit", "1"),
                        ("--export", "{world}/new")):
        yield _case(f"{flag} without --tasks", (_RUN, "--data", "{world}/plain", flag, value), f"{flag}: it has no")
    for flag, value in (("--stride", "1"), ("--max_samples", "1"), ("--eod_mask_loss", ""),
                        ("--document_attention", "")):
        yield _case(f"{flag} with tasks only", (*own, "own", flag, *filter(None, [value])), f"{flag}: it has no", good)
    for what, path in {"under a file": "{world}/file/x", "other folder": "{world}/done", "proc": "/proc/x"}.items():
        yield _case(f"--export {what}", (*own, "own", "--export", path), path.rsplit("/", 1)[1], good)


def _case(what: str, words: tuple[str, ...], culprit: str, *files: tuple[str, bytes]) -> Case:
    return Case(f"evaluate {what}", _PROGRAM, words, culprit, files)
