"""List the models that can be trained: families, presets, and which decoders of transformers are proved to train.

    ds-pretrain models
    ds-pretrain models --prove gpt_oss mamba2
    ds-pretrain models --prove --output decoders.csv
"""

import csv
import datetime
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.cli import Parser, text
from pretrain.errors import REJECTED, ConfigError
from pretrain.extensions.wrapped.extension import their_model_types
from pretrain.model.config import load_model_config, preset_names
from pretrain.model.families import FAMILIES
from pretrain.paths import check_file

if TYPE_CHECKING:
    from pretrain.extensions.wrapped.all_decoders import ModelResult

_WIDTH = 80
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"


def main() -> int:
    """Print the lists, or the results. Return 2 if a named model_type cannot be trained."""
    parser = Parser(description="List families and presets. With --prove: prove on tiny copies that decoders of the "
                                "installed transformers train as transformers' own, with equal losses and gradients.")
    parser.add_argument("--prove", nargs="*", type=text, metavar="MODEL_TYPE",
                        help="prove these model types; without names: all causal language models of transformers")
    parser.add_argument("--output", type=text, metavar="FILE",
                        help="with --prove: write the table to this Markdown file, and replace only the table that it "
                             "has; or to a file .csv")
    args = parser.parse_args()
    if args.prove is None:
        if args.output is not None:
            raise ConfigError("--output", problem="it has no effect without --prove", remedy="add --prove")
        print("\n".join(_lists()))
        return 0
    output = None if args.output is None else Path(args.output)
    if output is not None:
        check_file(output, "--output")
    results = _prove(args.prove)
    if output is not None:
        _write(output, results)
    return REJECTED if args.prove and not all(result.trains for result in results) else 0


def _lists() -> list[str]:
    """Return the families, and the presets with their sizes."""
    families = textwrap.fill(", ".join(sorted(FAMILIES)), _WIDTH, initial_indent="families    ",
                             subsequent_indent=" " * 12)
    lines = [families, "", f"{'preset':<15}{'model_type':<14}"
             f"{'parameters':>18}{'layers':>8}{'hidden size':>13}{'vocabulary':>12}"]
    for name in preset_names():
        config = load_model_config(name)
        lines.append(f"{name:<15}{config.architecture:<14}{config.num_parameters():>18,}{config.num_layers:>8}"
                     f"{config.hidden_size:>13,}{config.vocab_size:>12,}")
    return [*lines, "", "Other decoders of transformers train with transformers' own modules:",
            "`ds-pretrain models --prove MODEL_TYPE`"]


def _prove(names: list[str]) -> "list[ModelResult]":
    """Prove the model types, and print each result when it is there. The result is sorted by name."""
    known = sorted(their_model_types())
    for name in names:
        if name not in known:
            raise ConfigError("--prove", problem=f"transformers {version('transformers')} has no causal language model "
                              f"of the model_type {name}", word=name, known=known)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    from pretrain.extensions.wrapped.all_decoders import prove_all  # imports torch

    results = []
    for result in prove_all(list(dict.fromkeys(names)) or known):
        results.append(result)
        print(f"{result.model_type:<26}{_how(result):<24}{_remark(result)}".rstrip(), flush=True)
    print(_summary(results))
    return sorted(results, key=lambda result: result.model_type)


def _how(result: "ModelResult") -> str:
    """Return as what it trains; "no" if it does not."""
    kinds = (("own family", result.own_family), ("wrapped", result.wrapped))
    return ", ".join(kind for kind, is_proved in kinds if is_proved) or "no"


def _remark(result: "ModelResult") -> str:
    """Return why it does not train, or which parameters get no gradient."""
    if result.bf16_problem:
        return f"fp32 only; in bf16: {result.bf16_problem}"
    if result.reason or not result.without_gradient:
        return result.reason
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in result.without_gradient)
    return f"no gradient: {next(iter(names))}{f' and {len(names) - 1} others' if len(names) > 1 else ''}"


def _summary(results: "Iterable[ModelResult]") -> str:
    results = list(results)
    return f"{sum(result.trains for result in results)} of {len(results)} model types train"


def _write(path: Path, results: "list[ModelResult]") -> None:
    """Write the table as CSV, or as Markdown, or replace it in a file that has one."""
    facts = f"{_summary(results)}: transformers {version('transformers')}, {datetime.date.today().isoformat()}"
    if path.suffix == ".csv":
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([
            ("model_type", "trains_as", "remark"),
            *((result.model_type, _how(result), _remark(result)) for result in results)])
        path.write_text(f"# {facts}, {' '.join(sys.argv)}\n{lines.getvalue()}", encoding="utf-8")
        return
    rows = "\n".join(f"| `{result.model_type}` | {_how(result)} | {_escaped(_remark(result))} |"
                     for result in results)
    table = (f"{_BEGIN}\n{facts}, `{' '.join(sys.argv)}`.\n\n"
             f"| model_type | trains as | refused because, or remark |\n| --- | --- | --- |\n{rows}\n{_END}\n")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    begin, end = before.find(_BEGIN), before.find(_END)
    if 0 <= begin < end:
        table = before[:begin] + table.rstrip("\n") + before[end + len(_END):]
    path.write_text(table, encoding="utf-8")


def _escaped(text: str) -> str:
    """Return a text for a cell of a table: no bars, tags, links or code."""
    return re.sub(r"([|<\[\]*_])", r"\\\1", text.replace("`", "'"))
