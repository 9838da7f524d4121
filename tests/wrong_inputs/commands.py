"""Wrong command lines: paths that cannot be read or written, files and flags that do not fit together."""

import json
from collections.abc import Iterator
from shlex import quote

from pretrain.active_extensions import run_files
from tests.wrong_inputs.case import DEEP, TRAIN, Case, case_of, of_extensions
from tests.wrong_inputs.paths import (
    IN_CHECKPOINT,
    LONG,
    NAME,
    NO_DATA,
    NO_FILE,
    NO_FOLDER,
    NO_NEW_FOLDER,
    NO_PREFIX,
    STEP5,
    UNREADABLE,
    UNWRITABLE,
    USED_FOLDER,
    USED_FOLDER_OR_STEP,
)
from tests.wrong_inputs.world import HF_MODEL, safetensors_of

EVALUATE = "evaluate"
# programs, command line, wrong paths, text of the error
_PATHS: list[tuple[tuple[str, ...], str, dict[str, str], str]] = [
    *(((TRAIN,), f"RIGHT --{flag} PATH", UNREADABLE, NAME)
      for flag in ("deepspeed_config", "model", "tokenizer", "train_data", "valid_data", "test_data", "config")),
    ((TRAIN,), "RIGHT --save PATH", {
        **NO_NEW_FOLDER, "in a run": "{world}/done/x", "checkpoint": STEP5, "below a checkpoint": f"{STEP5}/x",
        "checkpoints": "{world}/done/checkpoints", "dots": "{world}/nvme/../done/x/y", "newline": "{world}/a\nb",
        "shell variable": "${HOME}/run", "HOME": "$HOME/run", "command": "$(pwd)/run",
        "URL": "s3://bucket/run"}, "--save"),
    ((TRAIN,), "RIGHT --save PATH", {
        f"with {name}": f"{{world}}/run with {name}" for name in ("checkpoints", *run_files())}, NAME),
    ((TRAIN,), "RIGHT --checkpoint_mirror PATH", {
        **UNWRITABLE, "the run folder": "{world}/run", "in the run": "{world}/run/mirror", "dots": "{world}/x/../run",
        "file URL": "file://{world}/run", "protocol": "s4://bucket/x", "no protocol": "://x"}, "--checkpoint_mirror"),
    (("export", "import"), "RIGHT --output PATH", {"in a checkpoint": f"{STEP5}/x.html"}, IN_CHECKPOINT),
    (("prepare", "tokenizer"), "RIGHT --out PATH", {"in a checkpoint": f"{STEP5}/x"},
     IN_CHECKPOINT),
    (tuple(f"checkpoint {name}" for name in ("list", "verify", "prune", "consolidate", "diff")),
     "PATH REST", NO_FOLDER, NAME),
    (("checkpoint consolidate",), "{world}/done PATH", USED_FOLDER, NAME),
    (("checkpoint consolidate",), "{world}/done PATH",
     {"in a checkpoint": f"{STEP5}/x"}, IN_CHECKPOINT),
    (("summary", "import", "export", EVALUATE), "PATH REST", NO_FOLDER, NAME),
    (("import",), "RIGHT --output PATH", USED_FOLDER_OR_STEP, NAME),
    (("export",), "RIGHT --output PATH", USED_FOLDER, NAME),
    (("export",), "RIGHT --tokenizer PATH",
     {what: path for what, path in UNREADABLE.items() if what != "folder"}, "--tokenizer"),
    ((EVALUATE,), "RIGHT --tokenizer PATH", UNREADABLE, "--tokenizer"),
    ((EVALUATE,), "{world}/done --data PATH", UNREADABLE, "--data"),
    (("prepare", "tokenizer"), "PATH REST", UNREADABLE, NAME),
    (("tokenizer",), "RIGHT --out PATH", NO_NEW_FOLDER, NAME),
    (("corpus",), "PATH", NO_NEW_FOLDER, NAME),
    (("prepare",), "RIGHT --out PATH", NO_PREFIX, "--out"),
    (("data hash", "data verify", "data info"), "PATH", NO_DATA, NAME),
    (("compare",), "RIGHT --write PATH", {**NO_FILE, "folder": "{world}/nvme"}, "--write"),
    ((EVALUATE,), "RIGHT --json PATH", {**NO_FILE, "folder": "{world}/nvme"}, "--json"),
    (("compare",), "RIGHT --model PATH", UNREADABLE, "--model"),
    *((programs, words, {**NO_FILE, **paths}, culprit) for module in of_extensions()
      for programs, words, paths, culprit in getattr(module, "OUTPUT_FILES", ())),
    *(row for module in of_extensions() for row in getattr(module, "PATHS", ())),
]

_SAFETENSORS, _MANIFEST = "hf/model.safetensors", "done/checkpoints/global_step5/manifest.json"


def _tokenizer(size: int) -> bytes:
    """Return a tokenizer.json with this number of words."""
    return json.dumps({"version": "1.0", "added_tokens": [], "model": {
        "type": "WordLevel", "vocab": {f"w{number}": number for number in range(size)}, "unk_token": "w1"}}).encode()


# program, command line, text of the error, files
_LINES: list[tuple[str, str, str, dict[str, bytes]]] = [
    (TRAIN, "--check_only", "a flag of the launcher", {}),
    (TRAIN, "--model {world}/done --save {world}/run --deepspeed_config {world}/ds.json --train_steps 5",
     "done: this is a run folder", {}),
    *(("data verify", "{world}/corpus", "corpus.sha256.json", {"corpus.sha256.json": content})
      for content in (b"{", b"[]", b"\xff", b"[" * DEEP)),
    # weights
    ("import", "RIGHT", "config.json: model_type", {"hf/config.json": b'{"model_type": "t5"}'}),
    ("import", "RIGHT", "this safetensors file is damaged", {
        _SAFETENSORS: b"\x10" + bytes(7) + b"not a header...."}),
    ("import", "RIGHT", "it has both model.safetensors and", {"hf/model.safetensors.index.json": b"{}"}),
    ("import", "RIGHT", "its largest token is 320, and the model has only 320", {
        "hf/tokenizer.json": b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 320}, '
                             b'"unk_token": "a"}}'}),
    ("import", "RIGHT", "tokenizer.model", {"hf/tokenizer.model": b"nonsense"}),
    ("export", "RIGHT", "weights.pt: found SHA-256", {}),
    ("export", "RIGHT --format torch", "--format", {}),
    *((program, "RIGHT --step 7", "--step 7: ", {}) for program in ("export", EVALUATE)),
    # evaluation
    *((EVALUATE, f"{{world}}/done {words}", culprit, {}) for words, culprit in (
        ("--data {world}/plain.idx", "without .idx"), ("--data {world}/truncated", "truncated.bin"),
        ("--data {world}/corrupt", "corrupt.idx"), ("--data {world}/lonely", "lonely.bin"),
        ("--data {world}/big", "prepared with this model's tokenizer"), ("--data {world}/big_foreign", "token 59999"),
        ("--data {world}/corpus", "abababababab"), ("--data {world}/plain {world}/none", "none.idx"),
        ("--data {world}/plain --seq_length 1025", "at most 1024, the positions"),
        ("--data {world}/plain --seq_length 32 --stride 33", "at most --seq_length, 32"),
        ("--data {world}/text.txt --eod_mask_loss", "text.txt"),
        ("--data {world}/plain --partition_weights", "only one rank"),
        ("--split valid", "--train_data"), ("", "--train_data"))),
    (EVALUATE, "{world}/done --data {world}/text.txt", "names no tokenizer", {
        "done/run.json": json.dumps([{"flags": {"tokenizer": None}, "train_steps": 5}]).encode()}),
    (EVALUATE, "{world}/done --data {world}/text.txt --tokenizer {world}/large.json", "its largest token is 50299", {
        "large.json": _tokenizer(50_300)}),
    *(line for module in of_extensions() for line in getattr(module, "LINES", ())),
]

# Runs with --init_from: more flags, text of the error, files
_INIT = ("--deepspeed_config {world}/ds.json --train_data {world}/few --seq_length 16 --train_steps 50 "
         "--save {world}/run --init_from {world}/hf")
_INIT_FROM: list[tuple[str, str, dict[str, bytes]]] = [
    *((f"--init_from {source}", culprit, {}) for source, culprit in (
        ("{world}/none", "world/none: there is no such folder"), ("{world}/file", "world/file: this is a file"),
        ("{world}/file/x", "file/x"), ("{world}/" + LONG, LONG[:50]), ("/proc/self/none", "none"),
        ("gpt2", "--init_from gpt2"), ("{world}/nvme", "nvme: the folder has neither a config.json nor checkpoints"),
        ("{world}/done/checkpoints/global_step7", "global_step7"))),
    ("", "model.safetensors", {_SAFETENSORS: safetensors_of(HF_MODEL)[:-4]}),
    ("", "model.safetensors", {_SAFETENSORS: b""}),
    ("", "found the shape", {_SAFETENSORS: safetensors_of({**HF_MODEL, "n_embd": 12})}),
    ("", "the model of the config.json does not", {_SAFETENSORS: safetensors_of({**HF_MODEL, "n_layer": 2})}),
    ("", "found 384 rows", {_SAFETENSORS: safetensors_of({**HF_MODEL, "vocab_size": 384})}),
    ("", "config.json: model_type", {"hf/config.json": b'{"model_type": "t5"}'}),
    ("--init_from {world}/pickle", "pickle: the folder has neither a config.json", {"pickle/pytorch_model.bin": b""}),
    ("--init_from {world}/alone", "alone: there is neither model.safetensors", {
        "alone/config.json": json.dumps(HF_MODEL).encode()}),
    ("--init_from {world}", "the folder holds no checkpoint", {"checkpoints/notes.txt": b""}),
    ("--init_from {world}/done", "weights.pt: found 1 bytes; expected 7", {
        "done/checkpoints/global_step5/weights.pt": b"x"}),
    (f"--init_from {STEP5}", "the manifest is damaged", {_MANIFEST: b"{}"}),
    ("--model tiny", "--model tiny: vocab_size: found 8192; expected 320, as in the weights", {}),
    *((f"--model_overrides {change}", f"--model_overrides: {culprit}", {}) for change, culprit in (
        ("n_layer=2", "n_layer: found 2; expected 1, as in"), ("n_head=4", "n_head: found 4; expected 2, as in"),
        ("n_positions=32", "n_positions: found 32"), ("activation_function=relu", "activation_function"))),
    ("--seq_length 17", "at most 16, the positions of {world}/hf/config.json", {}),
    ("--train_data {world}/corpus", "token 499", {}),
    ("--tokenizer {world}/large.json", "--tokenizer {world}/large.json", {"large.json": _tokenizer(321)}),
    ("--resume required", "--resume required: there is no checkpoint", {}),
    ("--init_method small_init", "--init_method: it has no effect", {}),
    ("--save {world}/done --model tiny", "it started from random weights", {}),
    ("--save {world}/done --init_from {world}/done --model tiny", "random weights", {}),
]


def command_cases() -> Iterator[Case]:
    """Yield wrong paths of every flag and argument, and flags and files that cannot be combined."""
    for programs, words, paths, culprit in _PATHS:
        for program in programs:
            for what, path in paths.items():
                name = path.rstrip("/").rsplit("/", 1)[-1][:50].removesuffix(".bin").removeprefix("run with ")
                text = name if culprit == NAME else culprit
                yield case_of(f"{program} {words}: {what}", program, words.replace("PATH", quote(path)), text)
    for number, (program, words, culprit, files) in enumerate(_LINES):
        yield case_of(f"{program} {words[:50]}: {number}", program, words, culprit, files)
    for number, (words, culprit, files) in enumerate(_INIT_FROM):
        yield case_of(f"--init_from {words[:50]}: {number}", TRAIN, f"{_INIT} {words}", culprit, files)
