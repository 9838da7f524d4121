"""Print progress and losses of a run, and draw its loss curve: tools/summarize.py RUN [--plot FILE.svg]"""

from pretrain.analysis.summary import save_loss_plot, summarize, summary_lines
from pretrain.cli import Parser, path, run_main


def main() -> int:
    parser = Parser(description="Print progress and losses of a run, and draw its loss curve.")
    parser.add_argument("run", type=path, help="run folder (--save of the run)")
    parser.add_argument("--below_unigram_entropy", action="store_true",
                        help="exit with 1 unless the validation loss is below the unigram entropy")
    parser.add_argument("--plot", type=path, metavar="FILE.svg", help="draw the loss curve (needs matplotlib)")
    args = parser.parse_args()
    summary = summarize(args.run)
    print("\n".join(summary_lines(summary)))
    if args.plot is not None:
        save_loss_plot(args.run, args.plot)
    if args.below_unigram_entropy and not summary.below_unigram_entropy:
        print("The validation loss is not below the unigram entropy: the model knows no more than token frequencies.")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
