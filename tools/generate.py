"""Generate text from a checkpoint of a run: tools/generate.py RUN --prompt 'def '"""

from pretrain.checkpoint.load.select import select_checkpoint, tokenizer_of
from pretrain.cli import Parser, number, path, path_text, run_main, whole_number
from pretrain.data.tokenizer import load_tokenizer
from pretrain.distributed.device import detect_device
from pretrain.engine.prepare import prepare_deepspeed


def main() -> None:
    parser = Parser(description="Generate text from a checkpoint of any layout.")
    parser.add_argument("run", type=path, metavar="RUN",
                        help="run folder (--save of the run), or one of its global_stepN folders")
    parser.add_argument("--prompt", default="", help="text to continue (default: empty, for a new document)")
    parser.add_argument("--step", type=whole_number(), metavar="N",
                        help="step of the checkpoint (default: the newest complete checkpoint)")
    parser.add_argument("--tokenizer", type=path_text, metavar="PATH",
                        help="tokenizer (default: the run's --tokenizer)")
    parser.add_argument("--max_new_tokens", type=whole_number(1), default=100, metavar="N",
                        help="largest number of tokens to generate (default: %(default)s)")
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.8, metavar="X",
                        help="sampling temperature; 0: always choose the most likely token (default: %(default)s)")
    parser.add_argument("--top_k", type=whole_number(), default=50, metavar="N",
                        help="choose among the N most likely tokens; 0: among all (default: %(default)s)")
    parser.add_argument("--top_p", type=number(0, 1, above=True), default=0.95, metavar="X",
                        help="choose among the most likely tokens with this total probability (default: %(default)s)")
    parser.add_argument("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N",
                        help="seed of the random numbers (default: %(default)s)")
    args = parser.parse_args()
    # report wrong paths before torch is imported, which takes seconds
    select_checkpoint(args.run, args.step)
    load_tokenizer(args.tokenizer or tokenizer_of(args.run))
    prepare_deepspeed(detect_device())
    from pretrain.analysis.generate import Sampling, generate, load_trained_model

    trained = load_trained_model(args.run, step=args.step, tokenizer=args.tokenizer)
    print(generate(trained, args.prompt, Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                                  args.seed)))


if __name__ == "__main__":
    run_main(main)
