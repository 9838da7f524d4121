"""Sample text from a run's checkpoint: tools/generate.py RUN --prompt 'def '"""

from pretrain.checkpoint.load.select import select_checkpoint, tokenizer_of
from pretrain.cli import Parser, number, path, place, run_main, whole_number
from pretrain.data.tokenizer import load_tokenizer
from pretrain.distributed.device import detect_device
from pretrain.engine.prepare import prepare_deepspeed


def main() -> None:
    parser = Parser(description="Sample text from a checkpoint of any layout.")
    parser.add_argument("run", type=path, metavar="RUN", help="run folder (what --save named), or one global_stepN")
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--step", type=whole_number(), metavar="N", help="which checkpoint (default: the newest one)")
    parser.add_argument("--tokenizer", type=place, metavar="PATH",
                        help="(default: the one that the run was started with)")
    parser.add_argument("--max_new_tokens", type=whole_number(1), default=100, metavar="N",
                        help="(default: %(default)s)")
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.8, metavar="X",
                        help="0: always the likeliest token (default: %(default)s)")
    parser.add_argument("--top_k", type=whole_number(), default=50, metavar="N",
                        help="choose among the N likeliest tokens; 0: all (default: %(default)s)")
    parser.add_argument("--top_p", type=number(0, 1, above=True), default=0.95, metavar="X",
                        help="choose among the likeliest that together have this probability (default: %(default)s)")
    parser.add_argument("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N",
                        help="(default: %(default)s)")
    args = parser.parse_args()
    # wrong paths are reported before torch is imported, which takes seconds
    select_checkpoint(args.run, args.step)
    load_tokenizer(args.tokenizer or tokenizer_of(args.run))
    prepare_deepspeed(detect_device())
    from pretrain.analysis.generate import Sampling, generate, load_trained_model

    trained = load_trained_model(args.run, step=args.step, tokenizer=args.tokenizer)
    print(generate(trained, args.prompt, Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                                  args.seed)))


if __name__ == "__main__":
    run_main(main)
