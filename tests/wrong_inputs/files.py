"""Wrong contents of complete files, and wrong values of each key of the DeepSpeed JSON and the model's config.json."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.wrong_inputs.case import DEEP, NUMBERS, RAW, TOO_LARGE, TOOLS, Case
from tests.wrong_inputs.inputs import BASE, change


def content_cases() -> Iterator[Case]:
    """Yield files of every format with contents of another format."""
    train, right = "pretrain/train.py", TOOLS["pretrain/train.py"]
    for what, raw in RAW.items():
        yield Case(f"DeepSpeed JSON: {what}", train, (*right, "--deepspeed_config", "{world}/in.json"), "in.json",
                   (("in.json", raw),))
        for program, flags in ((train, right), ("tools/compare_zero.py", ["--world_size", "8"])):
            yield Case(f"{program} config.json: {what}", program, (*flags, "--model", "{world}/in.json"), "in.json",
                       (("in.json", raw),))
        if what not in ("twice", "string", "comma", "long_key"):
            yield Case(f"tokenizer.json: {what}", train, (*right, "--tokenizer", "{world}/in.json"), "in.json",
                       (("in.json", raw),))
            yield Case(f"tokenizer.model: {what}", train, (*right, "--tokenizer", "{world}/in.model"), "in.model",
                       (("in.model", raw),))
            yield Case(f".idx: {what}", train, (*right, "--train_data", "{world}/in"), "in.idx",
                       (("in.idx", raw), ("in.bin", b"")))
            yield Case(f"run.json: {what}", "tools/summarize.py", ("{world}/broken",), "run.json",
                       (("broken/run.json", raw),))
            yield Case(f"compared run.json: {what}", "tools/report.py", ("--compare", "{world}/done", "{world}/broken"),
                       "run.json", (("broken/run.json", raw),))
        if what not in ("twice", "nan", "long_key", "digits"):
            yield Case(f".meta.json: {what}", train, (*right, "--train_data", "{world}/plain"), "plain.meta.json",
                       (("plain.meta.json", raw),))
        yield Case(f"hostfile: {what}", "launch/supervise.py", (
            "--hostfile", "{world}/in.hosts", "--save", "{world}/run", "--", "deepspeed", "pretrain/train.py"),
            "in.hosts", (("in.hosts", raw),))
    for what, raw in {"list": b"- a", "string": b"x", "binary": bytes(range(256)), "utf16": "a: 1".encode("utf-16"),
                      "deep": b"[" * DEEP, "deep mapping": b"{a: " * DEEP, "deep value": b"save: " + b"[" * 3000,
                      "unclosed": b"a: [1", "tab": b"a:\n\t- 1", "unknown": b"no_such_key: 1",
                      "tag": b"a: !!python/x y",
                      "anchor": b"a: *none", "NUL": b'valid_data: "a\\0b"', "complex key": b"? [a, b]\n: 1",
                      "spellings": b"save-interval: 1\nsave_interval: 1\n", "digits": b"seed: " + b"9" * 5000,
                      "date": b"seed: 2024-99-99", "long key": b"k" * 1000 + b": 1",
                      "documents": b"a: 1\n---\nb: 2\n"}.items():
        culprit = {"NUL": "--valid_data", "digits": "--seed", "date": "--seed", "long key": "kkk"}.get(what, "in.yaml")
        yield Case(f"YAML: {what}", train, (*right, "--config", "{world}/in.yaml"), culprit, (("in.yaml", raw),))
    yield Case("YAML twice", train, (*right, "--config", "{world}/in.yaml", "--config", "{world}/in.yaml"), "--config",
               (("in.yaml", b"seed: 1"),))
    yield from _metadata_cases()
    yield from _row_cases()
    yield from _text_cases()
    yield from _doubtful_cases()


def _metadata_cases() -> Iterator[Case]:
    """Yield PREFIX.meta.json files with values of wrong types."""
    right = {"vocab_size": 512, "num_tokens": 20000, "num_documents": 100, "max_token": 499, "eod_token": 0,
             "tokenizer": "t", "tokenizer_sha256": "ab" * 32, "entropy_nats": 5.0}
    for key, value in itertools.product(right, ("[1]", "{}", "-1", "true", "1e999", TOO_LARGE, '"x"', "5")):
        text = json.dumps({**right, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"meta.json {key}: {value}", "pretrain/train.py",
                   (*TOOLS["pretrain/train.py"], "--train_data", "{world}/plain"), key,
                   (("plain.meta.json", text.encode()),))


def _row_cases() -> Iterator[Case]:
    """Yield run.json and metrics.jsonl files with values of wrong types."""
    start = json.dumps([{"flags": {"train_data": None, "valid_data": None}, "train_steps": 5}]).encode()
    row = {"step": 1, "loss": 1.0, "tokens_per_second": 1.0}
    for key, value in itertools.product(row, ('"x"', "[]", "{}", "true", "NaN", "1e999")):
        text = json.dumps({**row, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"metrics.jsonl {key}: {value}", "tools/summarize.py", ("{world}/broken",), key,
                   (("broken/run.json", start), ("broken/metrics.jsonl", text.encode())))
    for value in ('"x"', "[]", "{}", "true", "NaN"):
        text = f'{{"split": "valid", "step": 1, "eval_loss": {value}}}'
        yield Case(f"metrics.jsonl eval_loss: {value}", "tools/summarize.py", ("{world}/broken",), "eval_loss",
                   (("broken/run.json", start), ("broken/metrics.jsonl", text.encode())))
    for what, text in {"number": "[5]", "no flags": "[{}]", "flags": '[{"flags": 5}]',
                       "steps": '[{"flags": {}, "train_steps": "x"}]', "none": "[]", "object": "{}"}.items():
        for program in ("tools/summarize.py", "tools/generate.py"):
            if program == "tools/generate.py" and what == "steps":
                continue  # generate.py does not read the steps
            yield Case(f"{program} run.json: {what}", program, ("{world}/done",), "run.json",
                       (("done/run.json", text.encode()),))


def _text_cases() -> Iterator[Case]:
    """Yield wrong inputs of prepare_data.py and train_tokenizer.py."""
    for what, (name, raw) in {
            "not UTF-8": ("in.txt", b"\xff\xfe\x00"), "no JSON": ("in.jsonl", b"text"),
            "cut gzip": ("in.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00"), "empty": ("in.txt", b""),
            "no key": ("in.jsonl", b'{"txt": "a"}'), "number": ("in.jsonl", b'{"text": 5}'),
            "list": ("in.jsonl", b'["a"]'), "deep": ("in.jsonl", b"[" * DEEP),
            "surrogate": ("in.jsonl", b'{"text": "\\ud800"}'), "digits": ("in.jsonl", b"9" * 5000)}.items():
        for program in ("tools/prepare_data.py", "tools/train_tokenizer.py"):
            yield Case(f"{program}: {what}", program, (f"{{world}}/{name}", *TOOLS[program][1:-1], "{world}/new/out"),
                       name, ((name, raw),))
        culprit = f"{name}:1" if name.endswith("jsonl") else name
        yield Case(f"generate --prompt_file: {what}", "tools/generate.py",
                   ("{world}/done", "--prompt_file", f"{{world}}/{name}", "--jsonl_key=text"), culprit, ((name, raw),))


def _doubtful_cases() -> Iterator[Case]:
    """Yield text whose format is in doubt, or not supported."""
    for what, raw in {"JSON and words": b'{"text": "a"}\nwords', "indented JSON": b'{\n "text": "a"\n}',
                      "JSON list": b'[\n{"text": "a"}\n]', "UTF-16": "text".encode("utf-16"), "NUL": b"text\0",
                      "bzip2": b"BZh91AY", "tar": b"name".ljust(257, b"\0") + b"ustar", "Parquet": b"PAR1"}.items():
        for program in ("tools/prepare_data.py", "tools/train_tokenizer.py"):
            yield Case(f"{program}: {what}", program, ("{world}/in", *TOOLS[program][1:-1], "{world}/new/out"),
                       "/in:1" if what in ("NUL", "indented JSON", "JSON list") else "/in: ", (("in", raw),))


def prepare_cases() -> Iterator[Case]:
    """Yield output that would be lost, and flags of prepare_data.py that the tokenizer or the inputs do not allow."""
    program = "tools/prepare_data.py"
    words = tuple(TOOLS[program])
    state = b'{"version": 1, "finished": false, "skipped": 0, "record": {"--jsonl_key": "body"}}'
    for what, more, culprit, files in (
            ("existing output", (), "out.bin exists. Give --overwrite to replace it", (("out.bin", b"x"),)),
            ("existing summary", (), "out.summary.json exists", (("out.summary.json", b"x"),)),
            ("another preparation", (), "out.partial: an earlier preparation was stopped",
             (("out.partial/state.json", state),)),
            ("no BOS", ("--prepend_bos",), "it has no token such as <s>", ()),
            ("separator of JSON lines", ("--document_separator=x", "--format=jsonl"), "--document_separator", ()),
            ("a long separator", ("--document_separator", "x" * 2000), "--document_separator", ()),
            ("Parquet that is none", ("--format=parquet",), "text.txt: this is not a Parquet file", ())):
        yield Case(f"prepare_data: {what}", program, (*words, *more), culprit, files)


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
    return Case(f"JSON {about} {dotted}: {value[:20]}", "pretrain/train.py",
                (*TOOLS["pretrain/train.py"], "--deepspeed_config", "{world}/in.json"),
                culprit, (("in.json", (before + value + after).encode()),))


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
    for value in ("5", "null", "[]", "{}", "true", '"opt"', '"x"', '""'):
        yield _model_case("gpt2", {}, "model_type", value, "model_type")
        yield dataclasses.replace(_model_case("gpt2", {}, "model_type", value, "model_type"),
                                  name=f"compare_zero model_type: {value}", program="tools/compare_zero.py",
                                  words=("--model", "{world}/in.json", "--world_size", "8"))
    yield from _expert_model_cases()


def _key_cases(architecture: str, own: dict[str, Any], key: str, kind: type) -> Iterator[Case]:
    """Yield wrong values of one key, in the file and as an override."""
    for value in _WRONG_TYPES[kind]:
        yield _model_case(architecture, own, key, value, "rope" if key.startswith("rope") else key)
    for value in (*NUMBERS[:6], TOO_LARGE) if kind in (int, float) else ("no-such", ""):
        yield Case(f"--model_overrides {architecture} {key}={value}", "pretrain/train.py",
                   (*TOOLS["pretrain/train.py"], "--model", f"{{world}}/{architecture}.json",
                    "--model_overrides", f"{key}={value}"), key if value else "--model_overrides",
                   ((f"{architecture}.json", json.dumps({"model_type": architecture, **own}).encode()),))


def _expert_model_cases() -> Iterator[Case]:
    """Yield wrong config.json files of a model with experts, for compare_zero.py."""
    mixtral = {"model_type": "mixtral", **_LLAMA, "num_key_value_heads": 2, "num_local_experts": 4}
    for key, value in itertools.product([*list(mixtral)[1:], "head_dim", "num_experts_per_tok"], (
            '"x"', "-1", "0", "1.5", "[]", "1e999", TOO_LARGE)):
        text = json.dumps({**mixtral, key: "VALUE"}).replace('"VALUE"', value)
        yield Case(f"compare_zero mixtral {key}: {value}", "tools/compare_zero.py",
                   ("--model", "{world}/in.json", "--world_size", "8"), key, (("in.json", text.encode()),))


def _model_case(architecture: str, own: dict[str, Any], key: str, value: str, culprit: str) -> Case:
    text = json.dumps({"model_type": architecture, **own, key: "VALUE"}).replace('"VALUE"', value)
    return Case(f"{architecture} {key}: {value}", "pretrain/train.py",
                (*TOOLS["pretrain/train.py"], "--model", "{world}/in.json"), culprit, (("in.json", text.encode()),))
