"""Write RUN.yaml and RUN.json, the settings of a run on one's own data.

On a terminal, the command asks for what the flags leave out:

    ds-pretrain new run.yaml --data 'text/*.jsonl' --model 1.3B --nodes 2 --gpus_per_node 8 --gpu a100
"""

import argparse
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.checkpoint.load.start import check_start
from pretrain.cli import Parser, path_text, text, whole_number
from pretrain.commands.check import device_of
from pretrain.config.flags.check_flags import check_folders
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.validate import check_settings
from pretrain.data.text_inputs.chunk import ReadSettings
from pretrain.errors import ConfigError, tokens_text
from pretrain.extensions.new.answers import (
    CPU,
    TRAIN,
    Data,
    ModelOfRun,
    TokenizerOfRun,
    answer,
    data_of,
    machines_of,
    model_of,
    run_file,
    tokenizer_of,
    tokens_of,
)
from pretrain.extensions.new.files import (
    DEFAULT_SPLIT,
    NewRun,
    commands,
    hosts_note,
    json_text,
    layout_line,
    length_line,
    split_for,
    title,
    tokens_word,
    yaml_text,
)
from pretrain.extensions.new.layout import best_layout
from pretrain.extensions.new.sizes import FEWEST_STEPS, size_defaults
from pretrain.memory.plan_remarks import plan_remarks
from pretrain.paths import check_file
from pretrain.remote import path_or_url
from pretrain.terminal import print_rows

_USUAL_SEQ_LENGTH = 2048  # GPT-3's, whose batch sizes and learning rates are the defaults
_TOKENS_PER_PARAMETER = 20  # Hoffmann et al., arXiv 2203.15556, table 3
_MOST = 10**7


def main(argv: list[str] | None = None) -> None:
    """Write the two files, and print the commands that come next. Raises ConfigError."""
    flags = _parser().parse_args(argv)
    for path in (flags.run, flags.run.with_suffix(".json")):
        check_file(path, str(path))
        if path.exists() and not flags.overwrite:
            raise ConfigError(str(path), problem="the file exists", remedy="--overwrite replaces it")
        if path.exists() and flags.model and Path(flags.model).exists() and path.samefile(flags.model):
            raise ConfigError("--model", found=flags.model, expected="another file than those that are written")
    run = _new_run(flags)
    yaml, json = yaml_text(run), json_text(run)
    warnings = _check(run, yaml, json)
    for path, content in ((run.json_path, json), (run.path, yaml)):
        try:
            write_atomically(path, content)
        except OSError as error:
            raise ConfigError(str(path), problem=f"it cannot be written ({error.strerror})") from None
    print_rows([f"{run.path}, {run.json_path}: {title(run)}", f"layout     {layout_line(run)}",
                f"length     {length_line(run)}", *warnings], indent=11)
    first, *others = commands(run)
    print("\n".join([f"next: {first}", *(f"then: {line}" for line in others), *hosts_note(run)]))


def _parser() -> Parser:
    parser = Parser(description="Write RUN.yaml and RUN.json, the settings and the DeepSpeed JSON of a run on your own "
                                "data, with the layout that `ds-pretrain compare` recommends and the reason for each "
                                "value. On a terminal, the command asks for what the flags leave out.")
    parser.add_argument("run", metavar="RUN.yaml", type=run_file, help="file to write; RUN.json is written next to it")
    parser.add_argument("--data", nargs="+", type=path_or_url, metavar="INPUT",
                        help="text, JSON lines or Parquet: files, folders, globs, URLs; or the prefix of token files")
    parser.add_argument("--jsonl_key", type=text, default="text",
                        help="key of the text in a JSON line, column in a Parquet file (default: %(default)s)")
    parser.add_argument("--on_error", choices=("stop", "skip"), default="stop",
                        help="at files without text, and documents that cannot be read (default: %(default)s)")
    parser.add_argument("--tokenizer", type=path_text,
                        help="train, bytes, a SentencePiece .model, tokenizer.json, a folder with one, or a repository "
                             "(default: train, or that of the token files)")
    parser.add_argument("--vocab_size", type=whole_number(300, 2**24),
                        help="tokens of a tokenizer to train (default: 32,000; fewer for little text or a small model)")
    parser.add_argument("--model", type=path_text,
                        help="preset name, transformers config.json, or a number of parameters such as 1.3B: a Llama")
    parser.add_argument("--gpu", type=text, help="a100, h100, v100, ... as in `ds-pretrain compare`, or cpu (default: "
                                                 "this machine's)")
    for flag, about in (("world_size", "GPUs, or ranks on CPUs"), ("nodes", "machines"),
                        ("gpus_per_node", "GPUs per machine (default: this machine's)")):
        parser.add_argument(f"--{flag}", type=whole_number(1, _MOST), help=about)
    parser.add_argument("--tokens", type=text,
                        help="tokens to train on, such as 26B (default: 20 per parameter, at most all data once)")
    parser.add_argument("--steps", type=whole_number(1, 10**12), help="optimizer steps, instead of --tokens")
    parser.add_argument("--seq_length", type=whole_number(8, 10**8),
                        help=f"tokens in a sample (default: {_USUAL_SEQ_LENGTH}, or the model's positions)")
    parser.add_argument("--save", type=path_text, help="run folder (default: runs/RUN)")
    parser.add_argument("--overwrite", action="store_true", help="replace RUN.yaml and RUN.json")
    return parser


def _new_run(flags: argparse.Namespace) -> NewRun:
    """Gather the answers, and choose everything else. Raises ConfigError."""
    if flags.tokens is not None and flags.steps is not None:
        raise ConfigError("--tokens / --steps", found="both", expected="one of the two")
    folder, name = flags.run.parent, flags.run.stem
    prepared = folder / "prepared" / name  # with one slash, a tokenizer that does not exist would be a repository
    reading = ReadSettings(jsonl_key=flags.jsonl_key, skip_errors=flags.on_error == "skip", can_skip=True)
    data = answer("data", None if flags.data is None else shlex.join(flags.data),
                  lambda word: data_of(_words(word), reading, str(prepared / "tokens")),
                  "data: files, a folder or a glob of .jsonl, .txt or Parquet, or the prefix of token files")
    tokenizer = _tokenizer(flags, data, str(prepared / "tokenizer"))
    model = answer("model", flags.model, lambda word: model_of(word, tokenizer),
                   "model: a preset, a config.json, or a number of parameters such as 1.3B (a Llama)")
    tokenizer = model.tokenizer
    cluster = machines_of(flags)
    available = data.tokens(tokenizer.value)
    tokens = default = _default_tokens(model, available, DEFAULT_SPLIT)[0]
    if flags.steps is None:
        tokens = answer("tokens", flags.tokens, tokens_of, "tokens to train on", tokens_word(default))
    positions = model.config.max_positions
    if flags.seq_length is not None and flags.seq_length > positions:
        raise ConfigError("--seq_length", found=str(flags.seq_length),
                          expected=f"at most {positions}, the model's positions")
    seq_length = flags.seq_length or min(_USUAL_SEQ_LENGTH, positions)
    defaults = size_defaults(model.config.num_parameters())
    row = best_layout(model.config, cluster, seq_length=seq_length,
                      batch_tokens=min(defaults.batch_tokens, tokens / FEWEST_STEPS))
    save = answer("save", flags.save, _run_folder, "run folder", str(folder / "runs" / name))
    split = split_for(row.candidate.layout, data, tokenizer.value)
    fitting, why = _default_tokens(model, available, split)
    if flags.steps is None and tokens_text(tokens) == tokens_text(default):
        tokens = fitting
    else:
        why = f"as chosen; {why}"
    return NewRun(flags.run, data, reading, tokenizer, model, cluster, row, seq_length, flags.steps, tokens,
                  why, split, defaults, save)


def _words(line: str) -> list[str]:
    try:
        return [path_text(word) for word in shlex.split(line)]
    except ValueError as error:
        raise ConfigError("--data", problem=f"{line!r} is not a list of words: {error}") from None


def _run_folder(word: str) -> str:
    check_folders(path_text(word), None)
    return word


def _tokenizer(flags: argparse.Namespace, data: Data, new_folder: str) -> TokenizerOfRun:
    """Return the tokenizer of the flags, of the token files, or of the answer. Raises ConfigError."""
    known = data.tokenizer or None if flags.tokenizer is None else flags.tokenizer
    return answer("tokenizer", known, lambda word: tokenizer_of(word, data, flags.vocab_size, new_folder),
                  "tokenizer: train (on the data), bytes, a file or folder, or a repository of the Hub",
                  TRAIN if data.inputs else None)


def _default_tokens(model: ModelOfRun, available: int, split: str) -> tuple[int, str]:
    """Return the number of tokens to train on, and why. `split`: value of --split."""
    optimal = _TOKENS_PER_PARAMETER * model.config.num_parameters()
    rule = f"{tokens_text(optimal)} are 20 a parameter (arXiv 2203.15556)"
    parts = [float(part) for part in split.split(",")]
    once = max(1, int(available * parts[0] / sum(parts)))
    if once < optimal:
        return once, f"{tokens_text(once)} are the training part of the data, once; {rule}"
    return optimal, rule


def _check(run: NewRun, yaml: str, json: str) -> list[str]:
    """Check the two files before they are written, and return the warnings. Raises ConfigError.

    Text that is not prepared yet is not checked; the settings are.
    """
    gpu = run.cluster.gpu
    device = device_of("cpu", None) if gpu.kind == CPU else replace(
        device_of(None, gpu.word), bf16=gpu.knows_bf16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "run.yaml").write_text(yaml, encoding="utf-8")
        (path / "run.json").write_text(json, encoding="utf-8")
        args = parse_arguments(["--config", str(path / "run.yaml"), "--deepspeed_config", str(path / "run.json")])
        if run.data.inputs:
            plan = check_settings(args, world_size=run.cluster.world_size, device=device)
        else:
            plan = check_start(args, world_size=run.cluster.world_size, device=device).plan_to_run
    remarks = plan_remarks(plan, device, ranks_per_host=run.cluster.gpus_per_node)
    return [f"{kind:<11}{remark}" for kind, remark in remarks if kind == "warning"]
