"""What is measured: presets, and the flags of tools/bench.py. Imports no torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pretrain.cli import LONGEST_SECONDS, Parser, number, place, text, whole_number
from pretrain.config.arguments import parse_arguments
from pretrain.distributed.device import Device, cpu_device, cuda_device, detect_device
from pretrain.errors import ConfigError

WHAT = ("step", "overhead", "pipeline", "checkpoint", "startup", "scaling", "offload")
_SIZE = whole_number(1, 2**31 - 1)
_NO_DROPOUT = "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"


@dataclass(frozen=True)
class Preset:
    """A shape, and how long a round of it lasts."""

    model: str  # a preset of --model
    overrides: str  # --model_overrides; {positions} is the sequence length
    seq_length: int  # tokens
    micro_batch_size: int  # samples
    steps: int  # timed optimizer steps a round
    warmup_steps: int  # before the first round
    product_size: int  # rows of the square matrices that are multiplied to find the machine's rate
    side_by_side: bool = True  # False: the contenders do not fit on one device together, and follow one another


PRESETS = {
    "cpu": Preset("gpt2", f"n_layer=8,n_embd=512,n_head=8,vocab_size=16384,n_positions={{positions}},{_NO_DROPOUT}",
                  512, 8, steps=3, warmup_steps=2, product_size=4096),
    "cpu-small": Preset("gpt2", f"n_layer=2,n_embd=64,n_head=2,vocab_size=512,n_positions={{positions}},{_NO_DROPOUT}",
                        64, 4, steps=2, warmup_steps=2, product_size=512),
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
class Settings:
    """One call of tools/bench.py, judged."""

    what: tuple[str, ...]
    preset_name: str
    preset: Preset  # changed as the flags say
    device: Device
    precision: str  # bf16, fp32
    rounds: int
    timeout_s: float  # until a contender that does not answer counts as failed
    ranks: tuple[int, ...]  # numbers of ranks that --what scaling compares, from 1 up
    nvme_path: str | None
    extra: tuple[str, ...] = field(default=())  # further flags of pretrain/train.py, for this project alone

    @property
    def cores(self) -> tuple[int, ...]:
        """The CPU's cores that this process may use."""
        return tuple(sorted(os.sched_getaffinity(0)))

    def cores_of(self, rank: int, ranks: int) -> list[int]:
        """An equal share of them, none in common with another rank's; at least one."""
        share = max(len(self.cores) // ranks, 1)
        first = rank * share % len(self.cores)
        return list(self.cores[first : first + share])


def add_flags(parser: Parser) -> None:
    """Declare the flags."""
    parser.add_argument("--what", type=text, default="step", metavar="A,B",
                        help=f"{', '.join(WHAT)} or all (%(default)s)")
    parser.add_argument("--preset", type=text, default=None,
                        help=f"one of {', '.join(PRESETS)} (cpu; on CUDA h200-gpt3-1.3b)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="(what is there)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="(%(default)s)")
    parser.add_argument("--seq_length", type=_SIZE,
                        help="tokens a sample; the tokens a micro-batch stay as they are")
    parser.add_argument("--micro_batch_size", type=_SIZE, help="samples")
    parser.add_argument("--rounds", type=whole_number(1), default=5,
                        help="in which the contenders take turns (%(default)s)")
    parser.add_argument("--steps", type=whole_number(1), help="optimizer steps of one contender in one round")
    parser.add_argument("--ranks", type=text, default=None, metavar="1,2",
                        help="that --what scaling compares (1,2 and, where there are as many devices or cores, 4)")
    parser.add_argument("--nvme_path", type=place, default=os.environ.get("DS_PRETRAIN_NVME_PATH"),
                        help="folder on the disk that --what offload measures (DS_PRETRAIN_NVME_PATH)")
    parser.add_argument("--timeout", type=number(0, LONGEST_SECONDS, above=True), default=900.0,
                        help="seconds until a contender that does not answer counts as failed (%(default)s)")


def _choose(flag: str, word: str, known: Sequence[str]) -> str:
    if word not in known:
        raise ConfigError(flag, found=repr(word), expected=f"one of {', '.join(known)}",
                          word=word, known=known)
    return word


def _what(words: str) -> tuple[str, ...]:
    chosen = [_choose("--what", word, (*WHAT, "all")) for word in words.split(",")]
    return WHAT if "all" in chosen else tuple(dict.fromkeys(chosen))


def _ranks(words: str | None, most: int) -> tuple[int, ...]:
    if words is None:
        return tuple(number for number in (1, 2, 4) if number <= max(most, 1))
    try:
        numbers = tuple(sorted({int(word) for word in words.split(",")}))
    except ValueError:
        numbers = ()
    if len(numbers) < 2 or numbers[0] != 1 or numbers[-1] > most:
        raise ConfigError("--ranks", found=repr(words), expected=f"1 and more ranks, at most {most}, as 1,2")
    return numbers


def _preset(name: str, own: argparse.Namespace) -> Preset:
    preset = PRESETS[name]
    seq_length = own.seq_length or preset.seq_length
    tokens = preset.seq_length * preset.micro_batch_size
    micro_batch_size = own.micro_batch_size or max(tokens // seq_length, 1)
    return replace(preset, seq_length=seq_length, micro_batch_size=micro_batch_size,
                   steps=own.steps or preset.steps)


def settings_of(own: argparse.Namespace, extra: list[str], *, gpus: int) -> Settings:
    """The parsed flags, judged; `extra` are words for pretrain/train.py. Raises ConfigError."""
    kind = own.device or detect_device().kind
    device = cpu_device() if kind == "cpu" else cuda_device()
    if kind == "cuda" and not gpus:
        raise ConfigError("--device", found="cuda, and nvidia-smi lists no GPU", expected="cpu")
    name = own.preset or ("cpu" if kind == "cpu" else "h200-gpt3-1.3b")
    preset = _preset(_choose("--preset", name, list(PRESETS)), own)
    parse_arguments(extra)  # a misspelt flag is told now, and once
    most = gpus if kind == "cuda" else len(os.sched_getaffinity(0))
    if own.nvme_path is not None and not os.path.isdir(own.nvme_path):
        raise ConfigError("--nvme_path", found=f"{own.nvme_path}, no folder", expected="a folder on a local disk")
    what = _what(own.what)
    if "offload" in what and what != WHAT and own.nvme_path is None:
        raise ConfigError("--nvme_path", found="nothing", expected="a folder on the disk that is to be measured")
    return Settings(what=what, preset_name=name, preset=preset, device=device, precision=own.precision,
                    rounds=own.rounds, timeout_s=own.timeout, ranks=_ranks(own.ranks, most), nvme_path=own.nvme_path,
                    extra=tuple(extra))
