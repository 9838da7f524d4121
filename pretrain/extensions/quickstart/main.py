"""Train a small model on a fresh machine: corpus, tokenizer, token files, training, summary, generated text.

The corpus is the source code of Python's standard library (11 to 30 MB), so nothing is downloaded. The command can be
given again: it skips finished parts. The training resumes, or reports that it is complete.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from pretrain.cli import Parser, path
from pretrain.distributed.device import detect_device
from pretrain.distributed.process import PROGRAM
from pretrain.errors import counted, one_line
from pretrain.shipped import find_template


def main() -> int:
    """Run all parts and return 0, or the exit code of the part that failed. Raises ConfigError."""
    parser = Parser(description="Train a model of 5.9 million parameters on the source code of Python's library, for "
                                "a few minutes: corpus, tokenizer, training, summary, generated text.",
                    epilog="The command can be given again: it skips finished parts, and the training resumes.")
    parser.add_argument("run", metavar="RUN_FOLDER", nargs="?", type=path, default=Path("runs/quickstart"),
                        help="folder for all files (default: %(default)s)")
    run = parser.parse_args().run
    begin = time.monotonic()
    ranks, layout, device = _layout()
    try:
        _make_data(run)
        settings = _write_settings(run, layout)
        _say(f"training on {device}: {counted(ranks, 'rank')}, {layout}")
        _run("--num_accelerators", str(ranks), "--config", str(settings), "--deepspeed_config", layout)
        _say("result")
        _run("summary", str(run), "--below_unigram_entropy")
        _say("a sample")
        _run("generate", str(run), "--prompt", "def read_", "--max_new_tokens", "120", "--seed", "1")
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    print(_next_commands(run, ranks, settings, seconds=time.monotonic() - begin))
    return 0


def _layout() -> tuple[int, str, str]:
    """Return the number of ranks, the layout and the name of the device."""
    import torch

    gpus = torch.cuda.device_count() if detect_device().kind == "cuda" else 0
    if gpus == 1:
        return 1, "zero1_bf16", "one GPU"
    return 2, "pipeline2_zero1_bf16", "two GPUs" if gpus else "the CPU"


def _make_data(run: Path) -> None:
    """Make the corpus, the tokenizer and the token files that do not exist yet."""
    corpus, tokenizer = run / "corpus", run / "tokenizer"
    if not (corpus / "valid.jsonl").exists():
        _say("corpus: the standard library's source files")
        _run("corpus", str(corpus))
    if not (tokenizer / "tokenizer.model").exists():
        _say("tokenizer: SentencePiece, 4096 pieces")
        _run("tokenizer", str(corpus / "train.jsonl"), "--out", str(tokenizer), "--vocab_size", "4096")
    for split in ("train", "valid"):
        if not (run / "data" / f"{split}.idx").exists():
            _say(f"tokens: {split}")
            _run("prepare", str(corpus / f"{split}.jsonl"), "--tokenizer", str(tokenizer), "--out",
                 str(run / "data" / split))


def _write_settings(run: Path, layout: str) -> Path:
    """Write the YAML of the training into the run folder unless it exists, and return its path."""
    path = run / "quickstart.yaml"
    if not path.exists():
        text = find_template("quickstart").read_text(encoding="utf-8")
        text = re.sub("^deepspeed_config: .*$", f"deepspeed_config: {layout}", text, flags=re.MULTILINE)
        text = re.sub("^(\\w+: )runs/quickstart(.*)$", lambda line: line[1] + json.dumps(f"{run}{line[2]}"), text,
                      flags=re.MULTILINE)
        path.write_text(text.replace("--config runs/quickstart", f"--config {one_line(shlex.quote(str(run)))}"),
                        encoding="utf-8")
    return path


def _run(*words: str) -> None:
    """Run a subcommand of ds-pretrain. Raises CalledProcessError.

    On Ctrl-C the subcommand gets the signal as well, and this function waits for it: a training saves a checkpoint.
    """
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        subprocess.run([sys.executable, PROGRAM, *words], check=True, env={**os.environ, "DS_PRETRAIN_NEXT": "0"})
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "")
    os.write(sys.stdout.fileno(), f"{bold}[quickstart] {text}{plain}\n".encode())


def _next_commands(run: Path, ranks: int, settings: Path, *, seconds: float) -> str:
    q, yaml = shlex.quote(str(run)), shlex.quote(str(settings))  # for commands that are copied from the text
    return f"""
Done in {seconds:.0f} s. All files are in {q}:
  quickstart.yaml               the settings of the training
  corpus/ tokenizer/ data/      text, SentencePiece model, tokens (.bin and .idx)
  checkpoints/                  DeepSpeed's sharded checkpoints
  metrics.jsonl events.jsonl    losses and events of the run
  run.json                      settings, versions and data of the run
Next:
  ds-pretrain generate {q} --prompt 'class Parser:'
  ds-pretrain check --world_size 8 --deepspeed_config zero3_bf16 --model gpt2 --model_overrides vocab_size=4096 \
--train_data {q}/data/train --tokenizer {q}/tokenizer --train_steps 1000 --save runs/gpt2
  ds-pretrain --num_accelerators {ranks} --config {yaml} --train_steps 500
  ds-pretrain evaluate {q}
  ds-pretrain export {q} --output {q}-hf"""
