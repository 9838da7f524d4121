"""Print progress and losses of a run, and draw its loss curve: tools/summarize.py RUN [--plot FILE.svg]"""

from pretrain.analysis.loss_plot import save_loss_plot
from pretrain.analysis.summary import Summary, summarize
from pretrain.cli import Parser, path, run_main


def _lines(summary: Summary) -> list[str]:
    def text(value: float | None, form: str) -> str:
        return "not known" if value is None else format(value, form)

    return [f"steps done            {summary.step} of {summary.train_steps}",
            f"training loss         {text(summary.loss, '.4f')}",
            f"validation loss       {text(summary.valid_loss, '.4f')} nats per token",
            f"unigram entropy       {text(summary.unigram_entropy, '.4f')} nats per token",
            f"speed                 {text(summary.tokens_per_second, ',.0f')} tokens/s"]


def main() -> int:
    parser = Parser(description="Print progress and losses of a run, and draw its loss curve.")
    parser.add_argument("run", type=path, help="run folder (--save of the run)")
    parser.add_argument("--below_unigram_entropy", action="store_true",
                        help="exit with 1 unless the validation loss is below the unigram entropy")
    parser.add_argument("--plot", type=path, metavar="FILE.svg", help="draw the loss curve (needs matplotlib)")
    args = parser.parse_args()
    summary = summarize(args.run)
    print("\n".join(_lines(summary)))
    if args.plot is not None:
        save_loss_plot(args.run, args.plot)
    if args.below_unigram_entropy and not summary.below_unigram_entropy:
        print("The validation loss is not below the unigram entropy: the model knows no more than token frequencies.")
        return 1
    return 0


if __name__ == "__main__":
    run_main(main)
