"""Sample text from a run's checkpoint: tools/generate.py RUN --prompt 'def '"""

from pathlib import Path

from pretrain.checkpoint.select import chosen_checkpoint, tokenizer_of
from pretrain.cli import Parser, run_main
from pretrain.data.tokenizer import load_tokenizer
from pretrain.device import detect_device
from pretrain.distributed import prepare_deepspeed
from pretrain.errors import ConfigError


def main() -> None:
    parser = Parser(description="Sample text from a checkpoint of any layout.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder (what --save named), or one global_stepN")
    parser.add_argument("--prompt", default="", help="text to continue (default: the beginning of a document)")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint (default: the newest whole one)")
    parser.add_argument("--tokenizer", metavar="PATH", help="(default: the one that the run was started with)")
    parser.add_argument("--max_new_tokens", type=int, default=100, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X",
                        help="0: always the likeliest token (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=50, metavar="N",
                        help="choose among the N likeliest tokens; 0: all (default: %(default)s)")
    parser.add_argument("--top_p", type=float, default=0.95, metavar="X",
                        help="choose among the likeliest that together have this probability (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    args = parser.parse_args()
    for name, low in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name}", found=getattr(args, name), expected=f"at least {low}")
    if not 0 < args.top_p <= 1:
        raise ConfigError("--top_p", found=args.top_p, expected="above 0 and at most 1")
    # wrong paths are reported before torch is imported, which takes seconds
    chosen_checkpoint(args.run, args.step)
    load_tokenizer(args.tokenizer or tokenizer_of(args.run))
    prepare_deepspeed(detect_device())
    from pretrain.generate import Sampling, generate, load_trained_model

    trained = load_trained_model(args.run, step=args.step, tokenizer=args.tokenizer)
    print(generate(trained, args.prompt, Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                                  args.seed)))


if __name__ == "__main__":
    run_main(main)
