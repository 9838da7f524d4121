"""`ds-pretrain import` adopts a run of another program, or imports weights of transformers, as the core's does."""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pretrain.checkpoint.convert.new_folder import check_new_folder, output_summary
from pretrain.checkpoint.format.manifest import Manifest
from pretrain.checkpoint.format.run_checkpoints import step_of
from pretrain.checkpoint.load.hf_folder import weight_files
from pretrain.cli import Parser, chosen, next_line, path, path_text, whole_number
from pretrain.commands.import_weights import OUTPUT, SOURCE, import_weights
from pretrain.errors import ConfigError, listed, one_line
from pretrain.extensions.adopt.foreign_run import OMISSIONS, ForeignRun, understood, with_sample_length
from pretrain.extensions.adopt.sources import KINDS, Source, find_source
from pretrain.hub import is_repository, snapshot_in
from pretrain.model.config import load_model_config
from pretrain.progress import terminal_console

if TYPE_CHECKING:
    from pretrain.extensions.adopt.adopt import Adoption

_PLACEHOLDERS = {"train_data": "PREFIX", "lr_schedule": "NAME"}
_LOG_WIDTH = 160  # columns of the table if the output is not a terminal
_MOST_KEYS = 40  # that one row lists


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description="Adopt a run of another program: weights, optimizer states, step and data position "
                                "become a run folder, which resumes in any layout. Or import weights of transformers.")
    parser.add_argument("source", type=path, metavar="SOURCE",
                        help=f"checkpoint of {', '.join(kind.name for kind in KINDS)}, or a folder with several; or "
                        f"weights alone: {SOURCE}")
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument("--save", type=path, metavar="RUN", help="new run folder, which also gets a run.yaml and a "
                     "ds_config.json with the settings that the source records")
    out.add_argument("--output", type=path, metavar="OUT",
                     help="import weights alone, also from a checkpoint of transformers that has more: " + OUTPUT)
    parser.add_argument("--step", type=whole_number(), metavar="N",
                        help="step of the checkpoint, in a folder with several (default: the newest)")
    parser.add_argument("--model", type=path_text, metavar="CONFIG",
                        help="config.json of the model, a folder with it, or a preset, for a source that has none")
    parser.add_argument("--seq_length", type=whole_number(1), metavar="N",
                        help="tokens of a sample, if the source does not record it; needed for torchtitan, which "
                        "counts tokens")
    parser.add_argument("--accept_without", action="append", default=[], metavar="NAME,...",
                        help="adopt the run although this is lost: " + ", ".join(OMISSIONS))
    return parser


def main() -> None:
    args = _parser().parse_args()
    args.accept_without = frozenset(chosen("--accept_without", args.accept_without, list(OMISSIONS)))
    if args.output is not None:
        _reject_flags_of_runs(args, "--output imports weights alone")
        import_weights(args.source, args.output)
        return
    name = str(args.source)
    config = None if args.model is None else dict(load_model_config(args.model).hf_config)
    source = None if is_repository(name) and not args.source.exists() else \
        find_source(args.source, step=args.step, config=config)
    if source is not None:
        _adopt(source, args)
        return
    if not is_repository(name):
        _check_has_weights(args.source)
        if (args.source / "optimizer.pt").is_file():
            raise ConfigError(str(args.source), problem="it has an optimizer.pt, but no trainer_state.json with the "
                              "step", remedy="copy the complete checkpoint; --output imports the weights alone")
    _reject_flags_of_runs(args, f"{args.source} has weights alone")
    import_weights(args.source, args.save)
    for line in next_line(f"ds-pretrain check --save {shlex.quote(str(args.save))} ..."):
        print(line)


def _reject_flags_of_runs(args: argparse.Namespace, reason: str) -> None:
    for flag, value in (("--step", args.step), ("--model", args.model), ("--seq_length", args.seq_length),
                        ("--accept_without", args.accept_without)):
        if value not in (None, frozenset()):
            raise ConfigError(flag, problem=f"it has no effect: {reason}", remedy="leave it out")


def _check_has_weights(folder: Path) -> None:
    """Raise ConfigError for a path at which nothing is recognized."""
    if folder.is_dir():
        if (folder / "config.json").is_file() or weight_files(folder) or snapshot_in(folder) != folder:
            return
        names = sorted(path.name for path in folder.iterdir())
        problem = "it holds no checkpoint that is recognized (it has " \
                  f"{', '.join(names[:5]) + (' ...' if len(names) > 5 else '') or 'no files'})"
    else:
        problem = "this is a file, and not a folder" if folder.exists() else "there is no such folder"
    raise ConfigError(str(folder), problem=problem, remedy="name the folder of a checkpoint of "
                      f"{', '.join(kind.name for kind in KINDS)}, or a transformers folder")


def _adopt(source: Source, args: argparse.Namespace) -> None:
    check_new_folder(args.save, or_same_conversion=False)
    if step_of(args.save) >= 0:
        raise ConfigError("--save", problem=f"{args.save} names a checkpoint", remedy="name a new run folder")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed detects an accelerator and warns
    run = source.read() if args.seq_length is None else with_sample_length(source.read(), args.seq_length)
    if args.step not in (None, run.step):
        raise ConfigError(f"--step {args.step}", problem=f"{source.folder} is the checkpoint of step {run.step}",
                          remedy="leave --step out, or name the folder around the checkpoints")
    from pretrain.extensions.adopt.adopt import adopt, plan_adoption
    from pretrain.extensions.adopt.run_files import RUN_YAML, missing_flags

    with understood(run.folder):  # the tensors are read now
        plan = plan_adoption(run, args.accept_without)
        manifest = adopt(plan, args.save)
    print(output_summary(args.save))
    print(f"{plan.config.parameters_text()}, architecture {plan.config.architecture}, step {run.step} of {run.program}")
    table = Table("what", "taken over", box=None, pad_edge=False)
    for what, value in _facts(plan, manifest):
        table.add_row(what, one_line(value))
    terminal_console(width=_LOG_WIDTH).print(table)
    for note in (*plan.notes, *(plan.tokenizer.notes if plan.tokenizer else ())):
        print(f"note: {one_line(note)}")
    missing = " ".join(f"--{flag} {_PLACEHOLDERS.get(flag, 'N')}" for flag in missing_flags(run))
    for line in next_line(f"ds-pretrain check --world_size RANKS --config {shlex.quote(str(args.save / RUN_YAML))} "
                          f"{missing}"):
        print(line)


def _rate(run: ForeignRun) -> str:
    """Return the learning rate of the last step or, if only that is recorded, of the next one."""
    if run.learning_rate is not None:
        return f"{run.learning_rate:g}"
    return f"{run.schedule['next_rate']:g} in the next step" if "next_rate" in run.schedule else "not recorded"


def _facts(plan: "Adoption", manifest: Manifest) -> Sequence[tuple[str, str]]:
    """Return what was taken over, and what was not, as rows of a table."""
    from pretrain.extensions.adopt.run_files import adopted_flags, ds_config_of

    run, omitted = plan.run, {each.name: f"no: {each.reason}" for each in plan.omissions}
    flags: dict[str, Any] = {**adopted_flags(run), **plan.decay.flags}
    params = ", ".join(f"{name} {value}" for name, value in manifest.optimizer.get("params", {}).items())
    left_out, clipping = ds_config_of(run)[1], manifest.recipe.get("gradient_clipping")
    position = f"{manifest.consumed_samples:,} samples of a batch of {run.global_batch_size or 'unknown size'}"
    rows = [
        ("weights", omitted.get("master_weights", "fp32")),
        ("optimizer states", omitted.get("optimizer", ", ".join(plan.states))),
        ("optimizer", f"{manifest.optimizer.get('type', 'not recorded')}: {params or 'no settings are recorded'}"),
        ("weight decay", omitted.get("weight_decay", "not recorded" if plan.decay.value is None else
                                    f"{plan.decay.value:g} of {'all' if plan.decay.decay_vectors else 'matrices'}"
                                    + (f" but {', '.join(plan.decay.no_weight_decay)}"
                                       if plan.decay.no_weight_decay else ""))),
        ("gradient clipping", "not recorded" if clipping is None else f"{clipping:g}" if clipping else "none"),
        ("step", f"{run.step}" + (f", of which {run.skipped_steps} were skipped" if run.skipped_steps else "")),
        ("learning rate", _rate(run)),
        ("schedule", omitted.get("schedule", flags.get("lr_schedule") or run.schedule.get("type") or "not recorded: "
                                 "the flags --lr_... or the JSON's scheduler describe it")),
        ("data position", omitted.get("data_position", position)),
        ("loss scale", omitted.get("loss_scale", "none" if run.loss_scale is None else
                                  f"{run.loss_scale.get('cur_scale', 0):g}")),
        ("random numbers", omitted.get("rng", "not needed: the model has no dropout")),
        ("settings", omitted.get("settings", "all have a counterpart")),
        ("other states", omitted.get("other_states", "none")),
        ("tokenizer", "none" if plan.tokenizer is None else ", ".join(path.name for path in plan.tokenizer.files)),
        ("flags in run.yaml", ", ".join(f"{name} {value}" for name, value in flags.items()) or "none"),
        *_left_out(left_out)]
    return rows


def _left_out(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a row for the keys of the source's JSON that are left out for one reason, for each reason."""
    keys: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        keys.setdefault(reason, []).append(key)
    return [("JSON keys left out", f"{listed(names, _MOST_KEYS)}: {reason}") for reason, names in keys.items()] or \
        [("JSON keys left out", "none")]
