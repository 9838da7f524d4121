"""Average the weights of checkpoints: the command line, and which checkpoints fit each other."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pretrain.checkpoint.convert.new_folder import check_new_weights, output_summary
from pretrain.checkpoint.format.manifest import MANIFEST, NOT_FINITE, AveragedRecord, Manifest
from pretrain.checkpoint.format.run_checkpoints import complete_checkpoints
from pretrain.checkpoint.format.verify import reject_damaged
from pretrain.checkpoint.load.find_checkpoint import (
    find_checkpoint,
    find_checkpoints_folder,
    is_checkpoint,
    tokenizer_of,
)
from pretrain.cli import Parser, number, path, whole_number
from pretrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pretrain.errors import ConfigError, counted
from pretrain.model.config import ModelConfig, model_config_from
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code

T = TypeVar("T")


@dataclass(frozen=True)
class AveragedCheckpoint:
    """A checkpoint, and its weight in the average."""

    folder: Path
    manifest: Manifest
    weight: float  # the weights of all checkpoints sum to 1

    def record(self) -> AveragedRecord:
        """Return the entry of the new manifest's `averaged`."""
        return {"folder": str(self.folder.absolute()), "step": self.manifest.step, "weight": self.weight,
                "manifest_sha256": hashlib.sha256((self.folder / MANIFEST).read_bytes()).hexdigest()}


@dataclass(frozen=True)
class AveragePlan:
    """A checked average."""

    run: Path
    sources: tuple[AveragedCheckpoint, ...]  # in ascending order of steps
    config: ModelConfig
    out: Path
    tokenizer: Tokenizer | None  # to copy; None: see `notes`
    notes: tuple[str, ...]  # lines that the user should see


def plan_average(run: Path, out: Path, *, steps: Sequence[int] | None = None, last: int | None = None,
                 weights: Sequence[float] | None = None, ema: float | None = None) -> AveragePlan:
    """Check an average of checkpoints of a run. Only manifests, file sizes and the tokenizer are read.

    Args:
        run: run folder or its checkpoints folder.
        out: new run folder; if its name is global_step0, only the checkpoint is written.
        steps: of the checkpoints. Either this or `last` is given.
        last: number of the newest good checkpoints.
        weights: one for each checkpoint in the order of `steps`, or from the oldest to the newest with `last`.
        ema: the weight of each checkpoint is this fraction of the next newer one's weight.

    Raises ConfigError.
    """
    if is_checkpoint(run):
        raise ConfigError(str(run), problem="this is a single checkpoint", remedy="name a run folder")
    check_new_weights(out, "averaged")
    found, notes = _newest(run, last) if steps is None else (_of_steps(run, steps), [])
    sources = _weighted(found, weights, ema, "--steps" if steps is not None else "--last")
    config = _same_model(sources)
    tokenizer, tokenizer_notes = _tokenizer(sources[-1])
    return AveragePlan(run, sources, config, out, tokenizer, (*notes, *tokenizer_notes))


def _of_steps(run: Path, steps: Sequence[int]) -> list[tuple[Path, Manifest]]:
    repeated = sorted({step for step in steps if list(steps).count(step) > 1})
    if repeated:
        raise ConfigError("--steps", problem=f"step {repeated[0]} is named more than once",
                          remedy="--weights gives a checkpoint a larger weight")
    if len(steps) < 2:
        raise ConfigError("--steps", found="one step", expected="at least two, such as 100,200,300")
    found = []
    for step in steps:
        folder, manifest, _ = find_checkpoint(run, step)
        if not manifest.is_good:
            raise ConfigError(str(folder), problem=NOT_FINITE, remedy="leave this step out")
        found.append((folder, manifest))
    return found


def _newest(run: Path, last: int | None) -> tuple[list[tuple[Path, Manifest]], list[str]]:
    """Return the newest good checkpoints, the oldest first, and notes about newer ones that are not used."""
    complete, errors = complete_checkpoints(find_checkpoints_folder(run))
    good = [(folder, manifest) for folder, manifest in complete if manifest.is_good]
    if last is None or last < 2:
        raise ConfigError("--last", found=last, expected="at least 2 checkpoints")
    if len(good) < last:
        find_checkpoint(run)  # raises ConfigError if there is none
        more = "--keep_checkpoints or --keep_every of a run keeps more of them"
        if len(good) < 2:
            raise ConfigError(str(run), problem=f"it has {counted(len(good), 'good checkpoint')}, and an average needs "
                              "at least 2", remedy=more)
        raise ConfigError("--last", found=last, expected=f"at most {len(good)}, the good checkpoints of {run}",
                          remedy=more)
    used = good[:last]
    oldest = used[-1][1].step
    bad = [f"{folder}: {NOT_FINITE}" for folder, manifest in complete if not manifest.is_good and
           manifest.step > oldest]
    return used[::-1], [f"not used: {line}" for line in (*errors, *bad)]


def _weighted(found: list[tuple[Path, Manifest]], weights: Sequence[float] | None, ema: float | None,
              flag: str) -> tuple[AveragedCheckpoint, ...]:
    """Return the checkpoints in ascending order of steps, with weights that sum to 1."""
    if weights is not None and len(weights) != len(found):
        raise ConfigError("--weights", found=f"{len(weights)} weights", expected=f"{len(found)}, one for each "
                          f"checkpoint of {flag}")
    if weights is not None and sum(weights) <= 0:
        raise ConfigError("--weights", problem="all weights are 0")
    pairs = sorted(zip(found, weights or [1.0] * len(found), strict=True), key=lambda pair: pair[0][1].step)
    values = [weight for _, weight in pairs]
    if ema is not None:
        values = [ema ** (len(pairs) - 1 - index) for index in range(len(pairs))]
    return tuple(AveragedCheckpoint(folder, manifest, value / sum(values))
                 for ((folder, manifest), _), value in zip(pairs, values, strict=True))


def _same_model(sources: Sequence[AveragedCheckpoint]) -> ModelConfig:
    """Return the model of all checkpoints. Raises ConfigError if they differ in the model or the tokenizer."""
    newest = sources[-1]
    config = model_config_from(newest.manifest.model, str(newest.folder / MANIFEST))
    for source in sources[:-1]:
        if source.manifest.model != newest.manifest.model:
            keys = [key for key in source.manifest.model.keys() | newest.manifest.model.keys()
                    if source.manifest.model.get(key) != newest.manifest.model.get(key)]
            raise ConfigError(str(source.folder), problem=f"its model differs from that of {newest.folder.name} in "
                              f"{', '.join(sorted(keys))}", remedy="average checkpoints of one run")
        if source.manifest.tokenizer_fingerprint != newest.manifest.tokenizer_fingerprint:
            raise ConfigError(str(source.folder), problem=f"its tokenizer differs from that of {newest.folder.name}",
                              remedy="average checkpoints of one run")
    return config


def _tokenizer(newest: AveragedCheckpoint) -> tuple[Tokenizer | None, list[str]]:
    """Return the run's tokenizer, or a note why the output has none."""
    recorded = newest.manifest.tokenizer_fingerprint
    if recorded is None:
        return None, []
    try:
        tokenizer = load_tokenizer(tokenizer_of(newest.folder))
    except ConfigError as error:
        return None, [f"the output has no tokenizer: {error}"]
    if not tokenizer.has_file:
        kind = "byte tokenizer" if tokenizer.is_bytes else f"encoding {tokenizer.name}"
        return None, [f"the run has the {kind}, which has no file: give --tokenizer {tokenizer.name} with the output"]
    if tokenizer.fingerprint != recorded:
        return None, [f"the output has no tokenizer: {tokenizer.path} has changed since the checkpoint was written"]
    return tokenizer, []


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return an argparse type: values that commas separate."""
    return lambda words: [parse(word) for word in words.split(",")]


def _parser() -> Parser:
    parser = Parser(description="Average the weights of several checkpoints of a run, of any layouts, into a "
                                "checkpoint of weights alone.")
    parser.add_argument("run", type=path, metavar="RUN", help="run folder (--save of the run)")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--steps", type=_list_of(whole_number()), metavar="N,N,...", help="steps of the checkpoints")
    which.add_argument("--last", type=whole_number(2), metavar="N", help="average the newest N good checkpoints")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--weights", type=_list_of(number()), metavar="W,W,...",
                     help="weight of each checkpoint, in the order of --steps, or the oldest first with --last "
                     "(default: all the same)")
    how.add_argument("--ema", type=number(0, 1, above=True), metavar="DECAY",
                     help="exponential moving average: the weight of each checkpoint is DECAY times that of the next "
                     "newer one")
    parser.add_argument("--output", type=path, required=True, metavar="OUT",
                        help="new run folder, with the average in OUT/checkpoints/global_step0 and the tokenizer in "
                        "OUT/tokenizer; if OUT's own name is global_step0, only this checkpoint is written")
    parser.add_argument("--model_code", type=imported_model_code, metavar="my_model:MyConfig", help=MODEL_CODE_HELP)
    return parser


def main() -> None:
    args = _parser().parse_args()
    # report wrong inputs before torch is imported, which takes seconds
    plan = plan_average(args.run, args.output, steps=args.steps, last=args.last, weights=args.weights, ema=args.ema)
    for source in plan.sources:
        reject_damaged(source.folder, source.manifest)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    from pretrain.extensions.average.average import average

    average(plan)
    print(output_summary(args.output))
    print("average of " + ", ".join(f"{source.weight:.4g} x step {source.manifest.step}" for source in plan.sources))
    for note in plan.notes:
        print(f"note: {note}")
