"""Presets and flags of `python tools/bench.py`. This module does not import torch."""

import argparse
from dataclasses import dataclass, replace

from pretrain.cli import LONGEST_SECONDS, Parser, number, text, whole_number
from pretrain.config.flags.parse import parse_arguments
from pretrain.distributed.device import Device, cpu_device, cuda_device, detect_device
from pretrain.errors import ConfigError

# choices of --what
SECTIONS = ("step", "profile", "overhead", "determinism", "checkpoint", "startup", "data", "store", "control")
_SIZE = whole_number(1, 2**31 - 1)
_NO_DROPOUT = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
_GPT2 = f"n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions={{positions}},{_NO_DROPOUT}"
_LLAMA = "num_hidden_layers=8,hidden_size=512,intermediate_size=1536,num_attention_heads=8,num_key_value_heads=2," \
         "vocab_size=16384,max_position_embeddings={positions},tie_word_embeddings=true"
_SMALL_LLAMA = "num_hidden_layers=2,hidden_size=64,intermediate_size=192,num_attention_heads=4," \
               "num_key_value_heads=2,vocab_size=512,max_position_embeddings={positions},tie_word_embeddings=false"


@dataclass(frozen=True)
class Preset:
    """A model, a batch, and the number of steps that one repetition times."""

    model: str  # a preset of --model
    overrides: str  # --model_overrides; {positions} is replaced by the sequence length
    seq_length: int  # tokens
    micro_batch_size: int  # samples
    steps: int  # timed optimizer steps of a repetition
    warmup_steps: int  # untimed optimizer steps before the first repetition
    product_size: int  # rows of the square matrices that measure the machine's rate of matrix products
    side_by_side: bool = True  # False: the baselines do not fit on one device together, so they run one after another


PRESETS = {
    "cpu": Preset("gpt2", _GPT2, 512, 8, steps=1, warmup_steps=1, product_size=4096),
    "cpu-2048": Preset("gpt2", _GPT2, 2048, 2, steps=1, warmup_steps=1, product_size=4096),
    "cpu-llama": Preset("llama2-7b", _LLAMA, 512, 8, steps=1, warmup_steps=1, product_size=4096),
    "cpu-llama-2048": Preset("llama2-7b", _LLAMA, 2048, 2, steps=1, warmup_steps=1, product_size=4096),
    "cpu-small": Preset("gpt2", f"n_layer=2,n_embd=64,n_head=2,vocab_size=512,n_positions={{positions}},{_NO_DROPOUT}",
                        64, 4, steps=2, warmup_steps=2, product_size=512),
    # the shapes of nanoGPT's shakespeare-char, whose steps are short
    "cpu-shakespeare": Preset("gpt2", "n_layer=4,n_embd=128,n_head=4,vocab_size=258,n_positions={positions},"
                              f"{_NO_DROPOUT}", 64, 12, steps=20, warmup_steps=5, product_size=1024),
    "cpu-small-llama": Preset("llama2-7b", _SMALL_LLAMA, 64, 4, steps=2, warmup_steps=2, product_size=512),
    "h200-gpt2-124m": Preset("gpt2", f"n_positions={{positions}},{_NO_DROPOUT}", 2048, 16, steps=20, warmup_steps=5,
                             product_size=8192),
    "h200-gpt3-1.3b": Preset("gpt3-1.3b", "n_positions={positions}", 2048, 8, steps=10, warmup_steps=5,
                             product_size=8192, side_by_side=False),
    "h200-llama-1b": Preset("llama3-1b", "", 2048, 8, steps=10, warmup_steps=5, product_size=8192,
                            side_by_side=False),
    "h200-llama-3b": Preset("llama3-3b", "", 2048, 4, steps=10, warmup_steps=5, product_size=8192,
                            side_by_side=False),
}


@dataclass(frozen=True)
class BenchSettings:
    """Validated flags of one call of `python tools/bench.py`."""

    sections: tuple[str, ...]  # --what
    preset_name: str
    preset: Preset  # with the sizes from --seq_length, --micro_batch_size and --steps
    device: Device
    precision: str  # bf16, fp32
    repetitions: int  # --rounds
    timeout_s: float  # a baseline that does not answer within this time has failed
    train_flags: tuple[str, ...] = ()  # flags of pretrain/train.py, for this project's baselines only


def add_flags(parser: Parser) -> None:
    """Add the flags of `python tools/bench.py`, except --json and --write."""
    parser.add_argument("--what", type=text, default="step", metavar="A,B",
                        help=f"sections to measure: {', '.join(SECTIONS)} or all (default: %(default)s)")
    parser.add_argument("--explain", dest="what", action="store_const", const="profile",
                        help="the same as --what profile")
    parser.add_argument("--preset", choices=PRESETS, default=None, metavar="PRESET",
                        help=f"model and batch: {', '.join(PRESETS)} (default: cpu; on CUDA h200-gpt3-1.3b)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None,
                        help="(default: cuda if this machine has a GPU)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="(default: %(default)s)")
    parser.add_argument("--seq_length", type=_SIZE,
                        help="tokens per sample; the number of tokens in a micro-batch does not change")
    parser.add_argument("--micro_batch_size", type=_SIZE, help="samples per micro-batch")
    parser.add_argument("--rounds", type=whole_number(1), default=5,
                        help="interleaved repetitions of every baseline (default: %(default)s)")
    parser.add_argument("--steps", type=whole_number(1), help="timed optimizer steps of one repetition")
    parser.add_argument("--timeout", type=number(0, LONGEST_SECONDS, above=True), default=900.0,
                        help="seconds without an answer after which a baseline has failed (default: %(default)s)")


def validate_flags(flags: argparse.Namespace, train_flags: list[str], *, gpus: int) -> BenchSettings:
    """Return the settings of the parsed flags. Raises ConfigError.

    Args:
        train_flags: arguments that the parser does not know, which must be flags of pretrain/train.py.
        gpus: number of GPUs that nvidia-smi lists.
    """
    kind = flags.device or detect_device().kind
    device = cpu_device() if kind == "cpu" else cuda_device()
    if kind == "cuda" and not gpus:
        raise ConfigError("--device", problem="cuda was chosen, but nvidia-smi lists no GPU",
                          remedy="choose --device cpu")
    name = flags.preset or ("cpu" if kind == "cpu" else "h200-gpt3-1.3b")
    preset = _preset(name, flags)
    parse_arguments(train_flags)  # raises ConfigError for a misspelt flag before any process is started
    return BenchSettings(sections=_sections(flags.what), preset_name=name, preset=preset, device=device,
                         precision=flags.precision, repetitions=flags.rounds, timeout_s=flags.timeout,
                         train_flags=tuple(train_flags))


def _sections(words: str) -> tuple[str, ...]:
    chosen = words.split(",")
    for word in chosen:
        if word not in (*SECTIONS, "all"):
            raise ConfigError("--what", found=repr(word), expected=f"one of {', '.join(SECTIONS)}, all", word=word,
                              known=SECTIONS)
    return SECTIONS if "all" in chosen else tuple(dict.fromkeys(chosen))


def _preset(name: str, flags: argparse.Namespace) -> Preset:
    preset = PRESETS[name]
    seq_length = flags.seq_length or preset.seq_length
    tokens = preset.seq_length * preset.micro_batch_size
    micro_batch_size = flags.micro_batch_size or max(tokens // seq_length, 1)
    return replace(preset, seq_length=seq_length, micro_batch_size=micro_batch_size,
                   steps=flags.steps or preset.steps)
