"""Sample text from a run's checkpoint: tools/generate.py RUN --prompt 'def '"""

from pathlib import Path

from pretrain.cli import Parser, run_main
from pretrain.device import detect_device
from pretrain.distributed import prepare_deepspeed
from pretrain.errors import ConfigError


def main() -> None:
    parser = Parser(description="Sample text from a checkpoint of any layout.")
    parser.add_argument("run", type=Path, help="run folder (what --save named)")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest whole one)")
    parser.add_argument("--tokenizer", help="default: the one that the run was started with")
    parser.add_argument("--max_new_tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    parser.add_argument("--top_k", type=int, default=50)
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, low in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name}", found=getattr(args, name), expected=f"at least {low}")
    if not 0 < args.top_p <= 1:
        raise ConfigError("--top_p", found=args.top_p, expected="above 0 and at most 1")
    prepare_deepspeed(detect_device())
    from pretrain.generate import Sampling, generate, load_trained_model

    trained = load_trained_model(args.run, step=args.step, tokenizer=args.tokenizer)
    print(generate(trained, args.prompt, Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p,
                                                  args.seed)))


if __name__ == "__main__":
    run_main(main)
