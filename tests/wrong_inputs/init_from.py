"""Wrong inputs of --init_from: no weights, damaged weights, and weights of another model."""

import json
from collections.abc import Iterator

from tests.wrong_inputs.case import LONG, Case
from tests.wrong_inputs.world import HF_MODEL, safetensors_of

_WEIGHTS, _CHECKPOINT = "hf/model.safetensors", "done/checkpoints/global_step5"
_RIGHT = {"--deepspeed_config": "{world}/ds.json", "--train_data": "{world}/few", "--seq_length": "16",
          "--train_steps": "50", "--save": "{world}/run", "--init_from": "{world}/hf"}
_SOURCES = {  # value of --init_from -> text that the error must contain
    "{world}/none": "world/none: there is no such folder", "{world}/file": "world/file: this is a file",
    "{world}/file/x": "file/x", "{world}/" + LONG: LONG[:50], "/proc/self/none": "none", "gpt2": "--init_from gpt2",
    "{world}/nvme": "nvme: the folder has neither a config.json nor checkpoints",
    "{world}/done/checkpoints/global_step7": "global_step7",
}
_FILES: dict[str, tuple[str, bytes, str]] = {  # name -> (file, its content, text that the error must contain)
    "truncated": (_WEIGHTS, safetensors_of(HF_MODEL)[:-4], "model.safetensors"),
    "no header": (_WEIGHTS, b"", "model.safetensors"),
    "other shape": (_WEIGHTS, safetensors_of({**HF_MODEL, "n_embd": 12}), "found the shape"),
    "more layers": (_WEIGHTS, safetensors_of({**HF_MODEL, "n_layer": 2}), "the model of the config.json does not"),
    "larger vocabulary": (_WEIGHTS, safetensors_of({**HF_MODEL, "vocab_size": 384}), "found 384 rows"),
    "unknown model": ("hf/config.json", b'{"model_type": "mamba"}', "config.json: model_type"),
    "pickle": ("pickle/pytorch_model.bin", b"", "pickle: the folder has neither a config.json"),
    "config alone": ("alone/config.json", json.dumps(HF_MODEL).encode(), "alone: there is neither model.safetensors"),
    "no checkpoint": ("checkpoints/notes.txt", b"", "the folder holds no checkpoint"),
    "incomplete checkpoint": (f"{_CHECKPOINT}/weights.pt", b"x", "weights.pt: found 1 bytes; expected 7"),
    "damaged manifest": (f"{_CHECKPOINT}/manifest.json", b"{}", "the manifest is damaged"),
}
_FOLDERS = {"pickle": "{world}/pickle", "config alone": "{world}/alone", "no checkpoint": "{world}",
            "incomplete checkpoint": "{world}/done", "damaged manifest": "{world}/" + _CHECKPOINT}
_OTHER_FLAGS: dict[str, tuple[dict[str, str], str]] = {
    "another --model": ({"--model": "tiny"}, "--model tiny: vocab_size: found 8192; expected 320, as in the weights"),
    "layers": ({"--model_overrides": "n_layer=2"}, "--model_overrides: n_layer: found 2; expected 1, as in"),
    "equal shapes": ({"--model_overrides": "n_head=4"}, "--model_overrides: n_head: found 4; expected 2, as in"),
    "learned positions": ({"--model_overrides": "n_positions=32"}, "--model_overrides: n_positions: found 32"),
    "activation": ({"--model_overrides": "activation_function=relu"}, "--model_overrides: activation_function"),
    "sequence": ({"--seq_length": "17"}, "at most 16, the positions of {world}/hf/config.json"),
    "data": ({"--train_data": "{world}/corpus"}, "token 499"),
    "tokenizer": ({"--tokenizer": "{world}/large.json"}, "--tokenizer {world}/large.json"),
    "required": ({"--resume": "required"}, "--resume required: there is no checkpoint"),
    "initial values": ({"--init_method": "small_init"}, "--init_method: it has no effect"),
    "run of random weights": ({"--save": "{world}/done", "--model": "tiny"}, "it started from random weights"),
    "own run": ({"--save": "{world}/done", "--init_from": "{world}/done", "--model": "tiny"}, "random weights"),
}
_LARGE = json.dumps({"version": "1.0", "added_tokens": [], "model": {
    "type": "WordLevel", "vocab": {f"w{number}": number for number in range(321)}, "unk_token": "w1"}}).encode()


def init_from_cases() -> Iterator[Case]:
    """Yield weights that cannot be read, that are damaged, and that do not fit the run."""
    for program in ("pretrain/train.py", "tools/check_config.py"):
        for source, culprit in _SOURCES.items():
            yield _case(program, f"source {source[:30]}", {"--init_from": source}, culprit)
        for what, (file, content, culprit) in _FILES.items():
            yield _case(program, what, {"--init_from": _FOLDERS.get(what, "{world}/hf")}, culprit, (file, content))
        for what, (flags, culprit) in _OTHER_FLAGS.items():
            yield _case(program, what, flags, culprit, ("large.json", _LARGE))
    yield Case("--model run folder", "pretrain/train.py", ("--model", "{world}/done", "--save", "{world}/run",
               "--deepspeed_config", "{world}/ds.json", "--train_steps", "5"), "done: this is a run folder")


def _case(program: str, what: str, flags: dict[str, str], culprit: str, *files: tuple[str, bytes]) -> Case:
    words = tuple(word for pair in (_RIGHT | flags).items() for word in pair)
    return Case(f"{program} --init_from: {what}", program, words, culprit, files)
