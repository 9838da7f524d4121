"""The subcommands `merge` and `split` of `ds-pretrain data`."""

import argparse

from pretrain.cli import LARGEST_INT, new_prefix, next_line, prefix, stop_on_signals, text, whole_number
from pretrain.commands.data import add_overwrite, bin_bytes, print_written
from pretrain.commands.next_command import after_prepare
from pretrain.data.prepare.summary import summary_text
from pretrain.extensions.merge_split.merge_shards import merge_shards, steps_of_shards
from pretrain.extensions.merge_split.merge_split import merge, split
from pretrain.extensions.merge_split.open_shards import named_shards, open_shards
from pretrain.progress import ProgressBar


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommands to those of `ds-pretrain data`."""
    help_of_prefix = "path of the data set, without .bin"
    command = commands.add_parser("merge", help="write the documents of several data sets into one",
                                  description="Write the documents of several data sets into one, in this order. "
                                              "The tokens get the widest of their types. Without PREFIX, or with the "
                                              "shards of `prepare --shard`, write the files that a preparation on one "
                                              "machine would have written.")
    command.set_defaults(function=_merge)
    command.add_argument("output", metavar="OUT", type=new_prefix, help="path of the new data set, without .bin")
    command.add_argument("prefixes", metavar="PREFIX", nargs="*", type=prefix,
                         help=f"{help_of_prefix} (default: the shards of OUT)")
    add_overwrite(command)
    command = commands.add_parser("split", help="divide the documents of a data set among several",
                                  description="Divide the documents of a data set among several.")
    command.set_defaults(function=_split)
    command.add_argument("prefix", metavar="PREFIX", type=prefix, help=help_of_prefix)
    command.add_argument("--out", required=True, metavar="OUT", nargs="+", type=new_prefix,
                         help="paths of the new data sets, without .bin")
    sizes = command.add_mutually_exclusive_group(required=True)
    sizes.add_argument("--proportions", type=text, metavar="P,P...", help="proportions of the documents: 969,30,1")
    sizes.add_argument("--documents", type=text, metavar="N,N...",
                       help="numbers of documents. One of them may be the word rest: rest,1000")
    command.add_argument("--seed", type=whole_number(0, LARGEST_INT),
                         help="choose the documents at random, with this seed; they keep their order. Without it, the "
                              "parts are consecutive documents, those of the flag --split of a run")
    add_overwrite(command)


def _merge(flags: argparse.Namespace) -> int:
    if (shards := named_shards(flags.output, flags.prefixes)) is not None:
        return _merge_shards(flags, shards)
    with stop_on_signals(), ProgressBar(f"merging into {flags.output}", bin_bytes(flags.prefixes)) as progress:
        writer, notes = merge(flags.output, flags.prefixes, overwrite=flags.overwrite, advance=progress.advance)
    for note in notes:
        print(f"note: {note}")
    print_written([writer])
    return 0


def _merge_shards(flags: argparse.Namespace, prefixes: list[str]) -> int:
    with stop_on_signals():
        shards = open_shards(prefixes)
        steps = steps_of_shards(shards)
        with ProgressBar(f"merging into {flags.output}", bin_bytes(prefixes)) as progress:
            merge_shards(flags.output, shards, steps=steps, overwrite=flags.overwrite, advance=progress.advance)
    print("\n".join([summary_text(flags.output, steps), *next_line(after_prepare(flags.output))]))
    return 0


def _split(flags: argparse.Namespace) -> int:
    with stop_on_signals(), ProgressBar(f"splitting {flags.prefix}", bin_bytes([flags.prefix])) as progress:
        writers = split(flags.prefix, flags.out, proportions=flags.proportions, documents=flags.documents,
                        seed=flags.seed, overwrite=flags.overwrite, advance=progress.advance)
    print_written(writers)
    return 0
