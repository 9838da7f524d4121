"""Sample text from a run's checkpoint: tools/generate.py RUN --prompt 'def '"""

from pretrain.checkpoint.select import chosen_checkpoint, tokenizer_of
from pretrain.cli import Parser, number, path, place, run_main, whole_number
from pretrain.data.tokenizer import load_tokenizer
from pretrain.device import detect_device
from pretrain.distributed import prepare_deepspeed


def main() -> None:
    parser = Parser(description="Sample text from a checkpoint of any layout.")
    parser.add_argument("run", type=path, help="run folder (what --save named)")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--step", type=whole_number(), help="which checkpoint (default: the newest whole one)")
    parser.add_argument("--tokenizer", type=place, help="default: the one that the run was started with")
    parser.add_argument("--max_new_tokens", type=whole_number(1), default=100)
    parser.add_argument("--temperature", type=number(0, 1e6), default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=whole_number(), default=50)
    parser.add_argument("--top_p", type=number(0, 1, above=True), default=0.95)
    parser.add_argument("--seed", type=whole_number(0, 2**32 - 1), default=0)
    args = parser.parse_args()
    # a wrong path is reported before torch is imported, which takes seconds
    chosen_checkpoint(args.run, args.step)
    load_tokenizer(args.tokenizer or tokenizer_of(args.run))
    prepare_deepspeed(detect_device())
    from pretrain.generate import Sampling, generate, load_trained_model

    trained = load_trained_model(args.run, step=args.step, tokenizer=args.tokenizer)
    print(generate(trained, args.prompt, Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                                  args.seed)))


if __name__ == "__main__":
    run_main(main)
