"""The second question about a reproducible step: which of its samples stand out, and how a branch leaves them out."""

import json
import math
import shlex
import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.analysis.recorded_data import open_data_of_step
from pretrain.checkpoint.format.hashed_files import write_atomically
from pretrain.errors import ConfigError, format_number, printable, reason_of
from pretrain.extensions.replay.documents import OddDocument, odd_documents
from pretrain.extensions.replay.launch import Layout, train_again
from pretrain.extensions.replay.order import SAMPLES_FILE, ReplayOrder
from pretrain.extensions.replay.target import Target
from pretrain.monitor.repeatable import OWN_CODE, repeated_config, repeated_flags
from pretrain.stored_json import read_object

COLUMNS = 79
_STEPS_AFTER = 3  # steps after the one in question, with and without its odd samples
_KEY = " " * 10  # width of the words before a colon


@dataclass(frozen=True)
class SampleAnswer:
    """What the examination found."""

    report: dict[str, Any]  # samples.json
    documents: list[OddDocument]
    command: str  # of a branch without the samples; "": none stands out

    def lines(self) -> list[str]:
        """Return the lines to print. The command is one line, to be copied."""
        wrapped = [part for line in answer_lines(self.report, self.documents) for part in _wrapped(line)]
        return [*wrapped, *(["skip:     the next line trains a branch without them", self.command]
                            if self.command else [])]

    def to_json(self) -> dict[str, Any]:
        return {**{key: value for key, value in self.report.items() if key not in ("tensors", "ids")},
                **{name: [{key: value for key, value in odd.items() if key != "token_losses"}
                          for odd in self.report[name]] for name in ("odd", "highest")},
                "documents": [asdict(document) for document in self.documents], "command": self.command,
                "lines": answer_lines(self.report, self.documents)}


def ask_about_samples(target: Target, layout: Layout, folder: Path, order: ReplayOrder) -> SampleAnswer:
    """Train up to the step once more, into `folder`, and examine its samples before it. Raises ConfigError."""
    train_again(folder, target, layout, replace(order, steps_after=_STEPS_AFTER))
    path = folder / "run" / SAMPLES_FILE
    try:
        report = read_object(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), problem=f"it cannot be read ({reason_of(error)})",
                          remedy=f"see {folder / 'log'}") from None
    documents = [] if target.start["flags"].get("dataset_module") else \
        odd_documents(open_data_of_step(target.run, target.start), report)
    command = branch_command(folder / "branch", target, layout, report["skip"]) if report["odd"] else ""
    return SampleAnswer(report, documents, command)


def branch_command(folder: Path, target: Target, layout: Layout, skip: str) -> str:
    """Write flags, DeepSpeed JSON and model of the run into a folder, and return the command of a branch.

    It trains from the checkpoint of the replay on, with the run's own flags, and leaves these samples out.
    """
    flags = repeated_flags(target.start)
    for name in ("resume_from", "skip_samples"):
        flags.pop(name, None)
    recorded = target.start["flags"].get("skip_samples")
    own: dict[str, Any] = {"skip_samples": ",".join(filter(None, [recorded, skip]))}
    if target.checkpoint is not None:
        flags.pop("init_from", None)
        own = {"resume_from": str(target.checkpoint.absolute()), **own}
    folder.mkdir(parents=True, exist_ok=True)
    files = {"run.yaml": flags, "deepspeed.json": repeated_config(target.start),
             "config.json": target.start["model_config"]}
    for name, values in files.items():
        write_atomically(folder / name, json.dumps(values, indent=1) + "\n")
    words = ["ds-pretrain", "--num_accelerators", str(target.world_size), "--config", str(folder / "run.yaml"),
             "--deepspeed_config", str(folder / "deepspeed.json"), "--model", str(folder / "config.json"),
             *(word for name in OWN_CODE if name in layout.more for word in (f"--{name}", layout.more[name])),
             *(word for name, value in own.items() for word in (f"--{name}", value)),
             "--save", f"{target.run}-without-{target.step}"]
    return shlex.join(words)


def _wrapped(line: str) -> list[str]:
    """Return a line in the columns of a terminal, in which characters of East Asia are two columns wide."""
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    key, colon, value = (text, "", "") if indent else text.partition(":")
    begin = f"{key}:".ljust(len(_KEY)) if colon else indent
    is_wide = any(unicodedata.east_asian_width(character) in "WF" for character in text)
    return textwrap.wrap(printable(value if colon else text), COLUMNS // 2 if is_wide else COLUMNS,
                         break_on_hyphens=False, initial_indent=begin,
                         subsequent_indent=indent + "  " if indent else _KEY)


def answer_lines(report: dict[str, Any], documents: Sequence[OddDocument]) -> list[str]:
    """Return the lines about the samples of a step."""
    if not report["odd"]:
        line = f"samples:  none of the {len(report['ids'])} samples of step {report['step']} stands out from those " \
               "of the neighbouring steps, by loss or gradient norm; the highest losses are"
        return [line, *_sample_lines(report, report["highest"], documents)]
    number = len(report["odd"])
    unsure = all(odd["certainty"] != "sure" for odd in report["odd"])
    lines = [f"samples:  {'unsure: ' if unsure else ''}{number} of {len(report['ids'])} samples of step "
             f"{report['step']} stand{'s' if number == 1 else ''} out"]
    lines += _sample_lines(report, report["odd"], documents)
    lines += _layer_lines(report)
    lines.append("without:  loss and gradient norm with these samples, and with them left out")
    for after, (whole, without) in enumerate(zip(report["with_all"], report["without_odd"], strict=True)):
        lines.append(f"  step {report['step'] + after}: loss {whole[0]:.4f}, {without[0]:.4f} without; gradient norm "
                     f"{whole[1]:.4g}, {without[1]:.4g} without")
    return lines


def _sample_lines(report: dict[str, Any], samples: Sequence[dict[str, Any]],
                  documents: Sequence[OddDocument]) -> list[str]:
    """Return the lines about samples and their documents. In large steps, the norms of some are not measured."""
    lines = []
    for sample in samples:
        norm = "" if math.isnan(sample["grad_norm"]) else \
            f", gradient norm {format_number(sample['grad_norm'])} (usual {format_number(report['usual_sample_norm'])})"
        lines.append(f"  sample {sample['id']}: loss {sample['loss']:.3f} (usual {report['usual_loss']:.3f}){norm}")
        for document in (each for each in documents if each.sample == sample["id"]):
            lines += _document_lines(document)
    return lines


def _document_lines(document: OddDocument) -> list[str]:
    lines = [f"    document {document.document} of {document.prefix}: {document.document_tokens:,} tokens, "
             f"{document.tokens:,} of them in the sample, from token {document.first_token:,} of the .bin on; loss "
             f"{document.loss:.3f}"]
    where = document.position or ", ".join(document.inputs[:3]) + (", ..." if len(document.inputs) > 3 else "")
    lines += [f"    from {where}"] if where else []
    lines += [f"    {line}" for line in document.odd]
    return [*lines, f"    {document.excerpt!r}"]


def _layer_lines(report: dict[str, Any]) -> list[str]:
    """Return where the gradient of the step is larger than those of the neighbouring steps."""
    def ratios(norms: dict[str, list[float]]) -> list[tuple[str, float]]:
        return [(name, step / usual) for name, (step, usual) in norms.items() if usual > 0]

    layers, tensors = ratios(report["layers"]), ratios(report["tensors"])
    larger = [f"{name} ({ratio:.1f} times)" for name, ratio in sorted(layers, key=lambda row: -row[1]) if ratio >= 1.5]
    if not larger:
        return []
    worst = ", ".join(f"{name} ({ratio:.1f} times)" for name, ratio in sorted(tensors, key=lambda row: -row[1])[:3])
    return [f"layers:   {len(larger)} of {len(layers)} have a larger gradient than in the neighbouring steps, most of "
            f"all {', '.join(larger[:3])}; tensors: {worst}"]
