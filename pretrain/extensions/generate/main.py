"""Generate text from a run, a checkpoint or a transformers folder: ds-pretrain generate RUN --prompt 'def '"""

import argparse
import json
from typing import TYPE_CHECKING

from pretrain.cli import Parser, number, path, path_text, say, text, whole_number
from pretrain.distributed.device import detect_device
from pretrain.engine.prepare import prepare_deepspeed
from pretrain.errors import ConfigError
from pretrain.extensions.generate.prompts import (
    EncodedPrompt,
    Prompt,
    encode_prompt,
    note_on_length,
    prompts_of_flags,
    read_prompt_file,
)
from pretrain.extensions.generate.source import check_devices, generation_dtype, generation_source
from pretrain.model.own_models import MODEL_CODE_HELP, imported_model_code

if TYPE_CHECKING:  # these import torch
    from pretrain.extensions.generate.decode import LoadedModel, Sampling

SEPARATOR = "-" * 8  # between two texts


def _parser() -> Parser:
    parser = Parser(description="Generate text from a checkpoint of any layout, or from a transformers model.")
    parser.add_argument("model", type=path, metavar="MODEL",
                        help="run folder (--save of the run), one of its global_stepN folders, or a transformers "
                             "folder (config.json and weights)")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT",
        help="text to continue; repeat the flag for several (default: empty, for a new document)")
    add("--prompt_file", type=path_text, metavar="FILE",
        help="one prompt per line; a .jsonl file has one object per line; - is standard input")
    add("--jsonl_key", type=text, default="prompt", metavar="KEY",
        help="key of the prompt in a .jsonl file (default: %(default)s)")
    add("--interactive", action="store_true",
        help="read a prompt per line from the terminal, and print each text while it is generated; Ctrl-C ends a text, "
             "Ctrl-D the program")
    add("--num_samples", type=whole_number(1, 1_000_000), default=1, metavar="N",
        help="texts for each prompt (default: %(default)s)")
    add("--batch_size", type=whole_number(1, 1_000_000), default=8, metavar="N",
        help="largest number of texts that are generated together (default: %(default)s)")
    add("--json", action="store_true",
        help="print a JSON object per text: prompt, completion, tokens, finish_reason (eos, stop or length)")
    _add_sampling(parser.add_argument_group("sampling"))
    add = parser.add_argument_group("model").add_argument
    add("--step", type=whole_number(), metavar="N",
        help="step of the checkpoint (default: the newest complete checkpoint)")
    add("--tokenizer", type=path_text, metavar="PATH",
        help="tokenizer (default: the run's --tokenizer, or that of the transformers folder)")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto",
        help="data type of the weights (default: auto, the precision of the run if the device computes fast in it, "
             "otherwise fp32)")
    add("--devices", type=whole_number(1, 1024), metavar="N",
        help="number of GPUs over which the layers are spread (default: as few as hold the model)")
    add("--model_code", type=imported_model_code, metavar="my_model:MyConfig", help=MODEL_CODE_HELP)
    return parser


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max_new_tokens", type=whole_number(1), default=100, metavar="N",
        help="largest number of tokens to generate (default: %(default)s)")
    add("--temperature", type=number(0, 1e6), default=0.8, metavar="X",
        help="sampling temperature; 0: always choose the most likely token (default: %(default)s)")
    add("--top_k", type=whole_number(), default=50, metavar="N",
        help="choose among the N most likely tokens; 0: among all (default: %(default)s)")
    add("--top_p", type=number(0, 1, above=True), default=0.95, metavar="X",
        help="choose among the most likely tokens with this total probability (default: %(default)s)")
    add("--repetition_penalty", type=number(0, 1e6, above=True), default=1.0, metavar="X",
        help="divide the score of tokens that the text already has by X; 1: no penalty (default: %(default)s)")
    add("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N",
        help="seed of the random numbers (default: %(default)s)")
    add("--stop", type=text, action="append", default=[], metavar="TEXT",
        help="end a text before TEXT; repeat the flag for several")
    add("--no_cache", action="store_true",
        help="compute all tokens again at each step, without the key-value cache (slow; to find errors)")


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags that exclude each other."""
    if args.prompt and args.prompt_file:
        raise ConfigError("--prompt_file", problem="--prompt is given too", remedy="use one of them")
    if args.num_samples > 1 and args.temperature == 0:
        raise ConfigError("--num_samples", problem="with --temperature 0, all samples of a prompt are the same",
                          remedy="omit one of the two flags")
    if args.interactive:
        given = {"--prompt": args.prompt, "--prompt_file": args.prompt_file, "--json": args.json,
                 "--num_samples": args.num_samples > 1}
        for flag in (flag for flag, value in given.items() if value):
            raise ConfigError(flag, problem="it has no effect with --interactive", remedy="omit one of the two flags")


def main() -> None:
    args = _parser().parse_args()
    _check_flags(args)
    # report wrong input before torch is imported, which takes seconds
    source = generation_source(args.model, step=args.step, tokenizer=args.tokenizer)
    for note in source.notes:
        say(f"note: {note}")

    def encode(prompt: Prompt) -> EncodedPrompt:
        return encode_prompt(prompt, source.tokenizer, max_positions=source.max_positions, leading=source.leading)

    prompts: list[EncodedPrompt] = []
    if not args.interactive:
        found = read_prompt_file(args.prompt_file, jsonl_key=args.jsonl_key) if args.prompt_file else \
            prompts_of_flags(args.prompt)
        prompts = [encode(prompt) for prompt in found]
        if note := note_on_length(prompts, args.max_new_tokens):
            say(note)
    device = detect_device()
    check_devices(args.devices, device)
    source.verify()
    if source.config is not None:
        prepare_deepspeed(device)  # its checkpoints hold objects of DeepSpeed
    from pretrain.extensions.generate.decode import Sampling
    from pretrain.extensions.generate.load_model import load

    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    loaded = load(source, generation_dtype(args.dtype, source.precision, device), device.kind, num_devices=args.devices,
                  rows=min(args.batch_size, max(1, len(prompts) * args.num_samples)),
                  positions=longest + args.max_new_tokens)
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.repetition_penalty,
                        args.seed, tuple(args.stop), use_cache=not args.no_cache)
    if args.interactive:
        from pretrain.extensions.generate.decode import interact

        interact(loaded, encode, sampling)
    else:
        _print_texts(loaded, prompts, sampling, args)


def _print_texts(loaded: "LoadedModel", prompts: list[EncodedPrompt], sampling: "Sampling",
                 args: argparse.Namespace) -> None:
    """Print each text as soon as its batch ends, or a JSON object for each."""
    from pretrain.extensions.generate.decode import generate

    completions = generate(loaded, prompts, sampling, num_samples=args.num_samples, batch_size=args.batch_size)
    for index, completion in enumerate(completions):
        prompt = completion.prompt.prompt.text
        if args.json:
            print(json.dumps({"prompt": prompt, "completion": completion.text, "tokens": completion.tokens,
                              "finish_reason": completion.finish_reason}, ensure_ascii=False), flush=True)
        else:
            print(f"{SEPARATOR}\n" if index else "", prompt, completion.text, sep="", flush=True)

