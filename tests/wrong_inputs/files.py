"""Wrong contents of complete files, and wrong values of each key of the DeepSpeed JSON and the model's config.json."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.wrong_inputs.case import DEEP, NUMBERS, RAW, TOO_LARGE, TRAIN, Case, case_of, of_extensions
from tests.wrong_inputs.inputs import BASE, change

# format, program, command line, file with contents of another format
_READERS: list[tuple[str, str, str, str]] = [
    ("DeepSpeed JSON", TRAIN, "RIGHT --deepspeed_config {world}/in.json", "in.json"),
    ("config.json", TRAIN, "RIGHT --model {world}/in.json", "in.json"),
    ("config.json", "compare", "--world_size 8 --model {world}/in.json", "in.json"),
    ("tokenizer.json", TRAIN, "RIGHT --tokenizer {world}/in.json", "in.json"),
    ("tokenizer.model", TRAIN, "RIGHT --tokenizer {world}/in.model", "in.model"),
    (".idx", TRAIN, "RIGHT --train_data {world}/in", "in.idx"),
    ("run.json", "summary", "{world}/broken", "broken/run.json"),
    (".meta.json", TRAIN, "RIGHT --train_data {world}/plain", "plain.meta.json"),
    *(row for module in of_extensions() for row in getattr(module, "READERS", ())),
]
_YAML = {  # contents -> text of the error
    **dict.fromkeys((
        b"- a", b"x", bytes(range(256)), "a: 1".encode("utf-16"), b"[" * DEEP, b"{a: " * DEEP, b"save: " + b"[" * 3000,
        b"a: [1", b"a:\n\t- 1", b"no_such_key: 1", b"a: !!python/x y", b"a: *none", b"? [a, b]\n: 1",
        b"save-interval: 1\nsave_interval: 1\n", b"a: 1\n---\nb: 2\n"), "in.yaml"),
    b'valid_data: "a\\0b"': "--valid_data", b"seed: " + b"9" * 5000: "--seed", b"seed: 2024-99-99": "--seed",
    b"k" * 1000 + b": 1": "kkk",
}


def content_cases() -> Iterator[Case]:
    """Yield files of every format with contents of another format."""
    for (name, program, line, file), (what, raw) in itertools.product(_READERS, RAW.items()):
        if name == ".meta.json" and what in ("twice", "nan", "long_key", "digits"):
            continue  # its reader accepts these
        more = {"in.bin": b""} if name == ".idx" else {}
        yield case_of(f"{program} {name}: {what}", program, line, file.rpartition("/")[2], {file: raw, **more})
    for raw, culprit in _YAML.items():
        yield case_of(f"YAML: {raw[:12]!r}", TRAIN, "RIGHT --config {world}/in.yaml", culprit, {"in.yaml": raw})
    yield case_of("YAML: two files", TRAIN, "RIGHT --config {world}/in.yaml --config {world}/none.yaml", "none.yaml",
                  {"in.yaml": b"seed: 1"})
    yield from _metadata_cases()
    yield from _row_cases()
    yield from _text_cases()
    yield from _prepare_cases()


def _metadata_cases() -> Iterator[Case]:
    """Yield PREFIX.meta.json files with values of wrong types."""
    right = {"vocab_size": 512, "num_tokens": 20000, "num_documents": 100, "max_token": 499, "eod_token": 0,
             "tokenizer": "t", "tokenizer_sha256": "ab" * 32, "entropy_nats": 5.0}
    for key, value in itertools.product(right, ("[1]", "{}", "-1", "true", "1e999", TOO_LARGE, '"x"', "5")):
        text = json.dumps({**right, key: "VALUE"}).replace('"VALUE"', value)
        yield case_of(f"meta.json {key}: {value}", TRAIN, "RIGHT --train_data {world}/plain", key,
                      {"plain.meta.json": text.encode()})


def _row_cases() -> Iterator[Case]:
    """Yield run.json and metrics.jsonl files with values of wrong types."""
    start = json.dumps([{"flags": {"train_data": None, "valid_data": None}, "train_steps": 5}]).encode()
    training = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0}
    evaluation = {"split": "valid", "step": 1, "eval_loss": 1.0}
    rows = [*((training, key) for key in training), (evaluation, "eval_loss")]
    for (row, key), value in itertools.product(rows, ('"x"', "[]", "{}", "true", "NaN", "1e999")):
        text = json.dumps({**row, key: "VALUE"}).replace('"VALUE"', value)
        yield case_of(f"metrics.jsonl {key}: {value}", "summary", "{world}/broken", key,
                      {"broken/run.json": start, "broken/metrics.jsonl": text.encode()})
    for text in (b"[5]", b"[{}]", b'[{"flags": 5}]', b"[]", b"{}", b'[{"flags": {}, "train_steps": "x"}]'):
        yield case_of(f"summary run.json: {text!r}", "summary", "{world}/done", "run.json", {"done/run.json": text})


def _text_cases() -> Iterator[Case]:
    """Yield files with text that are damaged, or whose format is in doubt or not supported."""
    read_by = {"prepare": "{world}/%s REST --out {world}/new/out",
               "tokenizer": "{world}/%s REST --out {world}/new/out",
               "evaluate": "{world}/done --data {world}/%s"}
    for file, raw in (("in.txt", b"\xff\xfe\x00"), ("in.txt", b""), ("in.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"),
                      *(("in.jsonl", raw) for raw in (b"text", b'{"txt": "a"}', b'{"text": 5}', b'["a"]', b"[" * DEEP,
                                                     b'{"text": "\\ud800"}', b"9" * 5000))):
        for program, line in read_by.items():
            culprit = f"{file}:1" if file == "in.jsonl" and program != "evaluate" else file
            yield case_of(f"{program} {file}: {raw[:20]!r}", program, line % file, culprit, {file: raw})
    yield case_of("evaluate: no text", "evaluate", "{world}/done --data {world}/in.jsonl", "in.jsonl", {
        "in.jsonl": b'{"text": ""}'})
    for raw, where in ((b'{"text": "a"}\nwords', ""), (b'{\n "text": "a"\n}', "1"), (b'[\n{"text": "a"}\n]', "1"),
                       ("text".encode("utf-16"), ""), (b"text\0", "1"), (b"BZh91AY", ""), (b"PAR1", ""),
                       (b"name".ljust(257, b"\0") + b"ustar", "")):
        for program in ("prepare", "tokenizer"):
            yield case_of(f"{program} in: {raw[:20]!r}", program, read_by[program] % "in", f"/in:{where}", {"in": raw})


def _prepare_cases() -> Iterator[Case]:
    """Yield output that would be lost, and flags of prepare_data.py that the tokenizer or the inputs do not allow."""
    state = b'{"version": 3, "finished": false, "skipped": 0, "record": {"--jsonl_key": "body"}}'
    for flags, culprit, files in (
            ("", "out.bin exists. Give --overwrite to replace it", {"out.bin": b"x"}),
            ("", "out.summary.json exists", {"out.summary.json": b"x"}),
            ("", "out.partial: an earlier preparation was stopped", {"out.partial/state.json": state}),
            ("--prepend_bos", "it has no token such as <s>", {}),
            ("--document_separator=x --format=jsonl", "--document_separator", {}),
            (f"--document_separator {'x' * 2000}", "--document_separator", {}),
            ("--format=parquet", "text.txt: this is not a Parquet file", {})):
        name = f"prepare_data {flags[:40]}: {culprit}"
        yield case_of(name, "prepare", f"RIGHT {flags}", culprit, files)


# keys of the DeepSpeed JSON

_WRONG_KINDS = {
    "bool": ('"yes"', "1", "[]", "{}", "0.5"), "int": ('"x"', "1.5", "true", "[]", "{}", "1e999", TOO_LARGE, "NaN"),
    "number": ('"x"', "true", "[]", "{}", "1e999", "-1e999", "NaN", '""'), "str": ("5", "true", "[]", "{}"),
    "list": ('"x"', "5", "{}", "true"), "pair": ("5", "[0.9]", '[0.9, "x"]', "[0.9, true]", "[0.9, 1e999]", "{}"),
}


def json_cases() -> Iterator[Case]:
    """Yield every key of the schema with values of wrong types and values outside its range."""
    from pretrain.config.ds_json.optimizers import OPTIMIZERS, SCHEDULERS
    from pretrain.config.ds_json.schema import REMOVED, TREE

    yield from _tree_cases(TREE, "", {})
    seen: dict[str, Any] = {}
    for name, tree in ((row.name, row.params) for row in OPTIMIZERS.values()):
        yield _json_case("optimizer.params", "5", {"optimizer.type": name}, name)
        new = {key: value for key, value in tree.items() if seen.get(key) != value}
        seen.update(tree)
        yield from _tree_cases(new, "optimizer.params.", {"optimizer.type": name, "optimizer.params": {}}, name)
    for name, tree in SCHEDULERS.items():
        changes = {"scheduler": {"type": name, "params": {}}}
        yield _json_case("scheduler.params", "5", {"scheduler": {"type": name}}, name)
        yield from _tree_cases(tree, "scheduler.params.", changes, name)
    for dotted in REMOVED:
        yield _json_case(dotted, "12345", {}, "removed")
    for value in ("5", "null", '"no-such"', "[]", "{}", "true"):
        yield _json_case("optimizer.type", value, {}, "type")
        yield _json_case("scheduler", f'{{"type": {value}}}', {}, "type")


def _tree_cases(tree: dict[str, Any], prefix: str, changes: dict[str, Any], about: str = "") -> Iterator[Case]:
    from pretrain.config.ds_json.schema import Key

    for name, key in tree.items():
        dotted = f"{prefix}{name}"
        if dotted in ("optimizer.params", "scheduler.params", "scheduler.type", "optimizer.type"):
            continue  # json_cases has cases for these
        if not isinstance(key, Key):
            for value in ("5", '"x"', "[]", "true"):
                yield _json_case(dotted, value, changes, about)
            yield _json_case(f"{dotted}.no_such_key", "1", changes, about)
            yield from _tree_cases(key, f"{dotted}.", changes, about)
            continue
        if key.rejected:
            yield _json_case(dotted, "12345", changes, about)
            continue
        values = list(_WRONG_KINDS.get(key.kind, ()))
        values += [str(key.low - 1)] if key.low is not None else []
        values += [str(key.high + 1)] if key.high is not None and key.kind != "pair" else []
        values += ['"no-such-word"'] if key.choices else []
        values += [] if key.null or key.kind == "any" else ["null"]
        for value in values:
            yield _json_case(dotted, value, changes, about)


def _json_case(dotted: str, value: str, changes: dict[str, Any], about: str) -> Case:
    document = json.loads(json.dumps(BASE))
    for where, changed in changes.items():
        change(document, where, copy.deepcopy(changed))
    parent = dotted.rpartition(".")[0]
    if dotted.endswith(("max_live_parameters", "no_such_key")) and parent == "zero_optimization":
        change(document, "zero_optimization.stage", 3)
    change(document, dotted, "VALUE")
    before, after = json.dumps(document, indent=1).split('"VALUE"')
    # the reader of the JSON rejects these numbers, and its message names the line
    unreadable = any(number in value for number in ("NaN", "1e999", TOO_LARGE))
    culprit = f"in.json:{before.count(chr(10)) + 1}: " if unreadable else dotted.split(".")[-1]
    return case_of(f"JSON {about} {dotted}: {value[:20]}", TRAIN, "RIGHT --deepspeed_config {world}/in.json", culprit,
                   {"in.json": (before + value + after).encode()})


# keys of the model's config.json

_LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
          "intermediate_size": 64, "max_position_embeddings": 128}
# The later families only have cases of the keys that no earlier family has, and of those in _READ_DIFFERENTLY.
_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 128},
    "gpt_neox": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
                 "intermediate_size": 64, "max_position_embeddings": 128, "rotary_pct": 1.0},
    "llama": _LLAMA, "mistral": _LLAMA, "qwen2": {**_LLAMA, "use_sliding_window": True}, "qwen3": _LLAMA,
    "gemma": _LLAMA, "gemma2": _LLAMA, "gemma3_text": _LLAMA, "olmo2": _LLAMA,
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 128, "rotary_dim": 16},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "seq_length": 128},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 512, "max_seq_len": 128},
    "phi": _LLAMA, "stablelm": {**_LLAMA, "num_key_value_heads": 2}, "starcoder2": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_key_value_heads": 2},
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_LLAMA, "num_key_value_heads": 2}, "qwen3_moe": {**_LLAMA, "num_key_value_heads": 2},
}
_ALL_KEYS = ("gpt2", "gpt_neox", "llama")
_READ_DIFFERENTLY = {("gemma3_text", "rope_parameters"), ("qwen2", "sliding_window")}
_WRONG_TYPES: dict[type, tuple[str, ...]] = {
    int: ('"x"', "1.5", "true", "[]", "{}", "-1", "0", "1e999", "NaN", TOO_LARGE, "1000000000"),
    float: ('"x"', "true", "[]", "{}", "-1", "1e999", "-1e999", "NaN", "1e300"), bool: ('"true"', "1", "[]", "null"),
    str: ("5", "[]", "{}", "true", "null", '"no-such"', '""'),
    dict: ('"x"', "5", "[1]", "true", '{"rope_type": 5}', '{"rope_type": []}', '{"rope_type": "no-such"}',
           '{"type": "linear"}', '{"rope_type": "linear", "factor": "x"}', '{"rope_type": "linear", "factor": 1e999}',
           '{"rope_type": "linear", "factor": -1}', '{"rope_theta": "x"}', '{"rope_theta": []}', '{"rope_theta": -5}',
           '{"partial_rotary_factor": "x"}', '{"partial_rotary_factor": 2}', '{"no_such_key": 1}',
           '{"full_attention": {"rope_type": "default"}}', '{"sliding_attention": {"rope_type": "linear"}}'),
    list: ('"x"', "5", "{}", "true", "[1, 2]", "[[], {}]", '["no-such", "full_attention"]', '["full_attention"]'),
}


def model_cases() -> Iterator[Case]:
    """Yield wrong values of every config.json key that affects the model, in the file and as an override."""
    from pretrain.model.config_keys import FIXED, NULLABLE
    from pretrain.model.families import FAMILIES

    seen: set[str] = set()
    for architecture, own in _MODELS.items():
        family = FAMILIES[architecture]
        for key, default in family.keys.items():
            if architecture not in _ALL_KEYS and key in seen and (architecture, key) not in _READ_DIFFERENTLY:
                continue
            yield from _key_cases(architecture, own, key, NULLABLE.get(key, type(default)))
        for key, fixed in (FIXED if architecture in _ALL_KEYS else family.fixed).items():
            yield _model_case(architecture, own, key, "12345" if fixed != 12345 else "1", key)
        yield _model_case(architecture, own, "no_such_key", "1", "no_such_key")
        seen.update(family.keys)
    for value in ("5", "null", "[]", "{}", "true", '"t5"', '"x"', '""'):
        yield _model_case("gpt2", {}, "model_type", value, "model_type")
        yield dataclasses.replace(_model_case("gpt2", {}, "model_type", value, "model_type"),
                                  name=f"compare_zero model_type: {value}", program="compare",
                                  words=("--model", "{world}/in.json", "--world_size", "8"))
    yield from _expert_model_cases()


def _key_cases(architecture: str, own: dict[str, Any], key: str, kind: type) -> Iterator[Case]:
    """Yield wrong values of one key, in the file and as an override."""
    for value in _WRONG_TYPES[kind]:
        yield _model_case(architecture, own, key, value, "rope" if key.startswith("rope") else key)
    for value in (*NUMBERS[:6], TOO_LARGE) if kind in (int, float) else ("no-such", ""):
        yield case_of(f"--model_overrides {architecture} {key}={value}", TRAIN,
                      f"RIGHT --model {{world}}/in.json --model_overrides {key}={value}",
                      key if value else "--model_overrides",
                      {"in.json": json.dumps({"model_type": architecture, **own}).encode()})


def _expert_model_cases() -> Iterator[Case]:
    """Yield wrong config.json files of a model with experts, for compare_zero.py."""
    mixtral = {"model_type": "mixtral", **_LLAMA, "num_key_value_heads": 2, "num_local_experts": 4}
    for key, value in itertools.product([*list(mixtral)[1:], "head_dim", "num_experts_per_tok"], (
            '"x"', "-1", "0", "1.5", "[]", "1e999", TOO_LARGE)):
        text = json.dumps({**mixtral, key: "VALUE"}).replace('"VALUE"', value)
        yield case_of(f"compare_zero mixtral {key}: {value}", "compare",
                      "--model {world}/in.json --world_size 8", key, {"in.json": text.encode()})


def _model_case(architecture: str, own: dict[str, Any], key: str, value: str, culprit: str) -> Case:
    text = json.dumps({"model_type": architecture, **own, key: "VALUE"}).replace('"VALUE"', value)
    return case_of(f"{architecture} {key}: {value}", TRAIN, "RIGHT --model {world}/in.json", culprit,
                   {"in.json": text.encode()})
