"""Wrong values for every flag of every program, and for every path that is read or written."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

from pretrain.cli import Number
from pretrain.config.flags.arguments import FLAGS, RunArguments
from pretrain.config.flags.flag import tokens
from pretrain.paths import RUN_FILES
from tests.wrong_inputs.case import LONG, NUMBERS, TOOLS, Case, actions_of, main_of


def flag_cases() -> Iterator[Case]:
    """Yield every flag of every program with no value, an empty value, wrong types, and numbers out of range."""
    for program, right in TOOLS.items():
        for action in actions_of(program, main_of(program)):
            flag = action.option_strings[-1] if not isinstance(action, argparse.BooleanOptionalAction) else \
                action.option_strings[0]
            if program == "pretrain/train.py" and flag != f"--{action.dest}":
                continue  # the second name of a flag
            for value in _wrong_values(program, action):
                yield Case(f"{program} {flag}={value[:20]}", program, _before_end(right, [f"{flag}={value}"]), flag)
            if action.nargs not in (0, "?"):
                words = ["--save", "{world}/run", flag, "--", "true"] if "--" in right else [*right, flag]
                yield Case(f"{program} {flag} (no value)", program, tuple(words), flag)
        yield Case(f"{program} --no_such_flag", program, _before_end(right, ["--no_such_flag=1"]), "--no_such_flag")
        yield Case(f"{program} --no_such_flag=LONG", program, _before_end(right, [f"--{LONG}"]), "--nnn")
    yield from _yaml_cases()


def _wrong_values(program: str, action: argparse.Action) -> Iterator[str]:
    """Yield values that the declaration of a flag rejects."""
    if action.nargs == 0:
        yield from ("x", "")  # --json=x
    elif action.const is True:
        yield from ("maybe", "2")
    elif action.choices is not None:
        yield from ("no-such-choice", "", "5.5")
    elif isinstance(action.type, Number) or action.type in (int, float, tokens):
        declared = FLAGS[action.dest] if program == "pretrain/train.py" else action.type
        limits = [value for value in (declared.low, declared.high) if value is not None and abs(value) < 1e20]
        words = [*NUMBERS, *(str(value + step) for value in limits for step in (-1, 1))]
        yield from (word for word in dict.fromkeys(words) if not _accepts(program, action, word))
    else:
        yield from ("", "~/x")


def _accepts(program: str, action: argparse.Action, word: str) -> bool:
    try:
        value = action.type(word)  # type: ignore[operator]
        if program == "pretrain/train.py":
            FLAGS[action.dest].check(action.dest, value)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def _yaml_cases() -> Iterator[Case]:
    """Yield each key of the YAML file with a value of another shape, and twice."""
    program = "pretrain/train.py"
    for f in dataclasses.fields(RunArguments):
        nested = "[[1]]" if "list" in str(f.type) else "[1]"
        for what, text, culprit in (("list", nested, f.name), ("mapping", "{a: 1}", f.name),
                                    ("twice", f"1\n\n{f.name}: 1", f"in.yaml:3: {f.name}")):
            yield Case(f"yaml {f.name}: {what}", program, ("--config", "{world}/in.yaml"), culprit,
                       (("in.yaml", f"{f.name}: {text}\n".encode()),))


def _before_end(right: list[str], words: list[str]) -> tuple[str, ...]:
    """Insert `words` at the end of a valid command line, or before the "--" in front of a supervised command."""
    end = right.index("--") if "--" in right else len(right)
    return (*right[:end], *words, *right[end:])


# files and folders

UNREADABLE = {"missing": "{world}/none", "folder": "{world}/nvme", "under a file": "{world}/file/x",
              "long": "{world}/" + LONG, "proc": "/proc/self/none"}
UNWRITABLE = {"under a file": "{world}/file/x", "long": "{world}/" + LONG, "proc": "/proc/x", "proc below": "/proc/x/y"}
READ_FLAGS = {"--deepspeed_config": "deepspeed_config", "--model": "model", "--tokenizer": "tokenizer",
              "--train_data": "", "--valid_data": "", "--test_data": "", "--config": "config"}


def _name_of(path: str) -> str:
    """Return the part of a path that the message must contain. Messages shorten long paths."""
    return path.rsplit("/", 1)[1][:50]


def path_cases() -> Iterator[Case]:
    """Yield paths that cannot be read or written, for every flag and argument with a path."""
    train = "pretrain/train.py"
    for flag, (what, path) in itertools.product(READ_FLAGS, UNREADABLE.items()):
        yield Case(f"{flag} {what}", train, (*TOOLS[train], flag, path), _name_of(path))
    for flag in ("--save", "--checkpoint_mirror"):
        for what, path in UNWRITABLE.items():
            yield Case(f"{flag} {what}", train, (*TOOLS[train], flag, path), flag)
    checkpoint = "{world}/done/checkpoints/global_step5"
    for what, path in {"run": "{world}/done/x", "checkpoint": checkpoint, "below a checkpoint": f"{checkpoint}/x",
                       "checkpoints": "{world}/done/checkpoints", "dots": "{world}/nvme/../done/x/y"}.items():
        yield Case(f"--save in another run: {what}", train, (*TOOLS[train], "--save", path), "--save")
    for what, path in {"newline": "{world}/a\nb", "shell variable": "${HOME}/run", "HOME": "$HOME/run",
                       "command": "$(pwd)/run"}.items():
        yield Case(f"--save {what}", train, (*TOOLS[train], "--save", path), "--save")
    for program, out in (("tools/export_hf.py", "--output"), ("tools/average_checkpoints.py", "--output"),
                         ("tools/import_hf.py", "--output"), ("tools/prepare_data.py", "--out"),
                         ("tools/train_tokenizer.py", "--out"), ("tools/report.py", "--output")):
        yield Case(f"{program} into a checkpoint", program, (*TOOLS[program], out, f"{checkpoint}/x.html"),
                   "lies in the checkpoint")
    for command in ("convert", "consolidate"):
        yield Case(f"{command} into a checkpoint", f"tools/checkpoint.py {command}",
                   ("{world}/done", f"{checkpoint}/x"), "lies in the checkpoint")
    yield Case("--save file", train, (*TOOLS[train], "--save", "{world}/file"), "--save")
    for name in ("checkpoints", *RUN_FILES):
        yield Case(f"--save with {name}", train, (*TOOLS[train], "--save", f"{{world}}/run with {name}"), name)
    for what, url in {"the run folder": "{world}/run", "inside": "{world}/run/mirror", "dots": "{world}/x/../run",
                      "file URL": "file://{world}/run", "protocol": "s4://bucket/x", "no protocol": "://x"}.items():
        yield Case(f"--checkpoint_mirror {what}", train, (*TOOLS[train], "--checkpoint_mirror", url),
                   "--checkpoint_mirror")
    for command in ("list", "verify", "prune", "convert", "consolidate", "diff"):
        program = f"tools/checkpoint.py {command}"
        for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
            yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
    for command, (what, path) in itertools.product(("convert", "consolidate"), {
            **UNWRITABLE, "file": "{world}/file", "other folder": "{world}/done"}.items()):
        program = f"tools/checkpoint.py {command}"
        yield Case(f"{program} to {what}", program, ("{world}/done", path), _name_of(path))
    for program in ("tools/generate.py", "tools/summarize.py"):
        for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
            yield Case(f"{program} {what}", program, (path,), _name_of(path))
    yield Case("generate --step", "tools/generate.py", ("{world}/done", "--step", "7"), "--step 7: ")
    for what, path in UNREADABLE.items():
        yield Case(f"generate --tokenizer {what}", "tools/generate.py", ("{world}/done", "--tokenizer", path),
                   "--tokenizer")
        for program in ("tools/prepare_data.py", "tools/train_tokenizer.py"):
            yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
        yield Case(f"generate --prompt_file {what}", "tools/generate.py", ("{world}/done", "--prompt_file", path),
                   _name_of(path))
    for program, what in itertools.product((*(f"tools/data.py {command}" for command in (
                                                "hash", "verify", "info", "merge", "split")),
                                            "tools/inspect_data.py documents"),
                                           ("none", "truncated", "corrupt", "lonely", "x.bin", "nvme/")):
        words = [word.replace("{world}/corpus", f"{{world}}/{what}") for word in TOOLS[program]]
        words = [f"{{world}}/{what}"] if program.endswith("hash") else words
        yield Case(f"{program} {what}", program, tuple(words), what.rstrip("/").removesuffix(".bin"))
    for what, content in (("damaged", b"{"), ("list", b"[]"), ("not UTF-8", b"\xff"), ("deep", b"[" * 100_000)):
        yield Case(f"data verify: {what} hashes", "tools/data.py verify", ("{world}/corpus",), "corpus.sha256.json",
                   (("corpus.sha256.json", content),))
    for what in ("2", "1,x", "1,1,1"):
        for flag in ("--proportions", "--documents"):
            program = "tools/data.py split"
            yield Case(f"{program} {flag} {what}", program, ("{world}/corpus", flag, what, "--out", "a", "b"), flag)
    for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
        yield Case(f"inspect_data step {what}", "tools/inspect_data.py step", (path, "1"), _name_of(path))
    yield from _weights_cases()
    yield from _generate_cases()
    yield from _output_cases()


def _weights_cases() -> Iterator[Case]:
    program = "tools/import_hf.py"
    for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
        yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
    for what, path in {**UNWRITABLE, "file": "{world}/file", "other folder": "{world}/done",
                       "other step": "{world}/global_step3"}.items():
        yield Case(f"{program} to {what}", program, ("{world}/hf", "--output", path), _name_of(path))
    tokenizer = b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 320}, "unk_token": "a"}}'
    for file, content, culprit in (
            ("config.json", b'{"model_type": "mamba"}', "config.json: model_type"),
            ("model.safetensors", b"\x10" + bytes(7) + b"not a header....", "the header is not valid JSON"),
            ("model.safetensors.index.json", b"{}", "it has both model.safetensors and"),
            ("tokenizer.json", tokenizer, "its largest token is 320, and the model has only 320"),
            ("tokenizer.model", b"nonsense", "tokenizer.model")):
        yield Case(f"{program} {file}", program, tuple(TOOLS[program]), culprit, ((f"hf/{file}", content),))
    program = "tools/average_checkpoints.py"
    for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
        yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
    for what, path in {**UNWRITABLE, "file": "{world}/file", "other folder": "{world}/hf",
                       "other step": "{world}/global_step3"}.items():
        yield Case(f"{program} to {what}", program, (*TOOLS[program][:-1], path), _name_of(path))
    program = "tools/export_hf.py"
    for what, path in {**UNREADABLE, "file": "{world}/file"}.items():
        yield Case(f"{program} {what}", program, (path, *TOOLS[program][1:]), _name_of(path))
        if what not in ("folder", "file"):
            yield Case(f"{program} --tokenizer {what}", program, (*TOOLS[program], "--tokenizer", path), "--tokenizer")
    for what, path in {**UNWRITABLE, "file": "{world}/file", "other folder": "{world}/done"}.items():
        yield Case(f"{program} to {what}", program, ("{world}/done", "--output", path), _name_of(path))
    yield Case(f"{program} damaged", program, tuple(TOOLS[program]), "weights.pt: found SHA-256")
    yield Case(f"{program} --step of no checkpoint", program, (*TOOLS[program], "--step", "7"), "--step 7: ")


def _generate_cases() -> Iterator[Case]:
    """Yield prompts that do not fit, and flags of generate.py that exclude each other."""
    for what, words, culprit in (
            ("long prompt", ("--prompt", "w1 " * 2000), "--prompt: the prompt has 2,000 tokens"),
            ("long second prompt", ("--prompt=a", "--prompt", "w1 " * 2000), "--prompt (number 2)"),
            ("prompt and file", ("--prompt=a", "--prompt_file={world}/text.txt"), "--prompt_file: --prompt is given"),
            ("interactive prompt", ("--interactive", "--prompt=a"), "--prompt: it has no effect"),
            ("interactive JSON", ("--interactive", "--json"), "--json: it has no effect"),
            ("greedy samples", ("--temperature=0", "--num_samples=2"), "--num_samples"),
            ("devices on the CPU", ("--devices=2",), "--devices: found 2")):
        yield Case(f"generate {what}", "tools/generate.py", ("{world}/done", *words), culprit)
    for what, files, words, culprit in (
            ("config without weights", {"config.json": b"{}"}, (), "broken_hf: "),
            ("damaged config", {"config.json": b"{", "model.safetensors": b""}, (), "broken_hf/config.json"),
            ("step", {"config.json": b"{}", "model.safetensors": b""}, ("--step=1",), "--step"),
            ("no tokenizer", {"config.json": b"{}", "model.safetensors": b""}, (), "--tokenizer {world}/broken_hf")):
        yield Case(f"generate transformers folder: {what}", "tools/generate.py", ("{world}/broken_hf", *words), culprit,
                   tuple((f"broken_hf/{name}", content) for name, content in files.items()))


def _output_cases() -> Iterator[Case]:
    places = {**UNWRITABLE, "file": "{world}/file"}
    for what, path in places.items():
        yield Case(f"make_corpus {what}", "tools/make_corpus.py", (path,), _name_of(path))
        yield Case(f"train_tokenizer --out {what}", "tools/train_tokenizer.py",
                   ("{world}/text.txt", "--out", path), _name_of(path))
    for what, path in {**UNWRITABLE, "slash": "{world}/nvme/", "dot": ".", "dot dot": "..", "suffix": "x.bin"}.items():
        yield Case(f"prepare_data --out {what}", "tools/prepare_data.py",
                   (*TOOLS["tools/prepare_data.py"], "--out", path), "--out")
        yield Case(f"data merge {what}", "tools/data.py merge", (path, "{world}/corpus"),
                   path.rsplit("/", 1)[-1][:50].removesuffix(".bin"))
        yield Case(f"data split --out {what}", "tools/data.py split",
                   ("{world}/corpus", "--documents", "rest", "--out", path), "--out")
    for flag, (what, path) in itertools.product(("--json", "--csv", "--plot", "--write"), {
            **UNWRITABLE, "folder": "{world}/nvme", "no folder": "{world}/none/x"}.items()):
        if what != "folder":
            path += ".html" * (flag == "--plot")
        yield Case(f"compare_zero {flag} {what}", "tools/compare_zero.py",
                   (*TOOLS["tools/compare_zero.py"], flag, path), flag)
    for (program, flag), (what, path) in itertools.product(
            (("tools/sanity_check.py", "--json"), ("tools/find_lr.py", "--json"), ("tools/find_lr.py", "--plot")),
            {**UNWRITABLE, "folder": "{world}/nvme", "no folder": "{world}/none/x"}.items()):
        yield Case(f"{program} {flag} {what}", program, (*TOOLS[program], flag, path), flag)
    yield Case("find_lr --plot png", "tools/find_lr.py", (*TOOLS["tools/find_lr.py"], "--plot", "x.png"), "--plot")
    yield Case("find_lr --to below --from", "tools/find_lr.py",
               (*TOOLS["tools/find_lr.py"], "--from", "0.1", "--to", "0.01"), "--to")
    yield Case("supervise without --", "launch/supervise.py", ("ds-pretrain", "--save", "{world}/run"), "`--`")
    yield Case("train.py --check_only", "pretrain/train.py", ("--check_only",), "a flag of the launcher")
    for what, path in {**UNREADABLE, **UNWRITABLE, "file": "{world}/file"}.items():
        yield Case(f"bench --write {what}", "tools/bench.py", ("--write", path), "--write")
        yield Case(f"compare_zero --configs {what}", "tools/compare_zero.py",
                   (*TOOLS["tools/compare_zero.py"], "--configs", path), _name_of(path))
    for what, path in UNREADABLE.items():
        yield Case(f"compare_zero --model {what}", "tools/compare_zero.py", ("--model", path, "--world_size", "8"),
                   "--model")
        yield Case(f"supervise --hostfile {what}", "launch/supervise.py",
                   ("--hostfile", path, "--save", "{world}/run", "--", "deepspeed", "pretrain/train.py"), "--hostfile")
        yield Case(f"supervise YAML {what}", "launch/supervise.py",
                   ("--", "deepspeed", "pretrain/train.py", "--config", path), "--config")
        yield Case(f"chaos --reference {what}", "tools/chaos.py",
                   _before_end(TOOLS["tools/chaos.py"], ["--reference", path]), "--reference")
    for what, path in UNWRITABLE.items():
        yield Case(f"supervise --save {what}", "launch/supervise.py", ("--save", path, "--", "true"), "--save")
        yield Case(f"check_cluster --save {what}", "tools/check_cluster.py", ("--save", path), "--save")
