"""Average the weights of checkpoints."""

import os
from collections.abc import Callable
from typing import TypeVar

from pretrain.checkpoint.convert.new_folder import output_summary
from pretrain.checkpoint.format.verify import reject_damaged
from pretrain.cli import Parser, number, path, whole_number
from pretrain.extensions.average.plan import plan_average
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code

T = TypeVar("T")


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
