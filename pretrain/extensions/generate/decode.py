"""Continue prompts with `generate` of a transformers model: batches, sampling, stop texts, prompts from a terminal."""

import hashlib
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pretrain.cli import say
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.generate.prompts import EncodedPrompt, Prompt

_GREEDY_BELOW = 1e-6  # temperature; scores divided by less would overflow
_INCOMPLETE = "\ufffd"  # a tokenizer decodes an incomplete UTF-8 character to this one
_POLL_S = 0.1


@dataclass(frozen=True)
class Sampling:
    """Settings of text generation. Temperature 0 is greedy decoding."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50  # 0: all tokens
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()  # a text ends before the first of these
    use_cache: bool = True


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model with its tokenizer."""

    model: Any  # PreTrainedModel
    tokenizer: Tokenizer
    end_tokens: frozenset[int]  # each of them ends a text
    unused_tokens: tuple[int, ...] = ()  # rows of the embedding that belong to no token of the tokenizer


@dataclass
class Completion:
    """The continuation of one prompt. `_Watcher` adds tokens until `finish_reason` is set."""

    prompt: EncodedPrompt
    index: int  # number of the text among all texts of this command; selects its random numbers
    tokens: list[int] = field(default_factory=list)  # generated, including the token that ended the text
    text: str = ""  # without that token, and without the stop text
    finish_reason: str = ""  # "eos" (an end token), "stop" (a stop text) or "length"


def generate(loaded: LoadedModel, prompts: Sequence[EncodedPrompt], sampling: Sampling, *, num_samples: int = 1,
             batch_size: int = 8) -> Iterator[Completion]:
    """Yield `num_samples` completions of each prompt, in the order of the prompts, as each batch ends.

    The random numbers of a text depend only on the seed and on the text's index. Therefore the batch size changes no
    text, except where rounding makes two tokens equally likely.
    """
    texts = [Completion(prompt, index * num_samples + sample) for index, prompt in enumerate(prompts)
             for sample in range(num_samples)]
    for start in range(0, len(texts), batch_size):
        yield from generate_batch(loaded, texts[start:start + batch_size], sampling)


def generate_batch(loaded: LoadedModel, texts: list[Completion], sampling: Sampling, *,
                   on_text: Callable[[str], None] | None = None) -> list[Completion]:
    """Continue all `texts` together, and return them. `on_text` receives each new piece of a single text."""
    model, watcher = loaded.model, _Watcher(loaded, texts, sampling, on_text)
    length = max(len(text.prompt.tokens) for text in texts)
    # Padding repeats the row's first token: the repetition penalty counts padding too, in some versions.
    padding = [length - len(text.prompt.tokens) for text in texts]
    rows = [[text.prompt.tokens[0]] * pad + text.prompt.tokens for text, pad in zip(texts, padding, strict=True)]
    mask = [[0] * pad + [1] * (length - pad) for pad in padding]
    settings = GenerationConfig(max_new_tokens=max(watcher.limits), do_sample=False, use_cache=sampling.use_cache,
                                repetition_penalty=sampling.repetition_penalty, pad_token_id=0,
                                suppress_tokens=list(loaded.unused_tokens) or None)
    with torch.inference_mode():
        model.generate(torch.tensor(rows, device=model.device),
                       attention_mask=torch.tensor(mask, device=model.device), generation_config=settings,
                       logits_processor=_sampler(sampling, texts, model.device),
                       stopping_criteria=StoppingCriteriaList([watcher]))
    return texts


def _sampler(sampling: Sampling, texts: Sequence[Completion], device: torch.device) -> LogitsProcessorList:
    """Return the processors after which the largest score of a row is its next token."""
    if sampling.temperature < _GREEDY_BELOW:
        return LogitsProcessorList()
    processors: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(float(sampling.top_p)))
    return LogitsProcessorList([*processors, _RowNoise(sampling.seed, [text.index for text in texts], device)])


class _RowNoise(LogitsProcessor):
    """Add Gumbel noise to the scores, so that the largest one is a sample of softmax(scores).

    This is the Gumbel-max trick (Maddison et al., A* Sampling, 2014). Each row has its own generator, unlike
    `do_sample` of transformers, so that a text does not depend on the others in its batch.
    """

    def __init__(self, seed: int, indexes: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator(device).manual_seed(_row_seed(seed, index)) for index in indexes]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tiny = torch.finfo(scores.dtype).tiny
        noise = torch.stack([torch.empty_like(row).exponential_(generator=generator)
                             for row, generator in zip(scores, self._generators, strict=True)])
        return scores - noise.clamp_(min=tiny).log_()


def _row_seed(seed: int, index: int) -> int:
    """Return a seed of 32 bits: torch's generator on the CPU ignores higher bits."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:4], "little")


class _Watcher(StoppingCriteria):
    """Collects the tokens of each text, and ends a text at an end token, a stop text or its limit."""

    def __init__(self, loaded: LoadedModel, texts: list[Completion], sampling: Sampling,
                 on_text: Callable[[str], None] | None) -> None:
        self.limits = [min(sampling.max_new_tokens, text.prompt.max_new_tokens) for text in texts]
        self._loaded, self._texts, self._stop, self._on_text = loaded, texts, sampling.stop, on_text
        self._prompts = [loaded.tokenizer.decode(text.prompt.tokens) for text in texts]
        self._printed = 0  # characters that on_text has received

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self._texts[row].finish_reason:
                self._add(row, token)
        return torch.tensor([bool(text.finish_reason) for text in self._texts], device=input_ids.device)

    def _add(self, row: int, token: int) -> None:
        text = self._texts[row]
        text.tokens.append(token)
        if token in self._loaded.end_tokens:
            text.finish_reason = "eos"
        elif len(text.tokens) == self.limits[row]:
            text.finish_reason = "length"
        if self._stop or self._on_text or text.finish_reason:
            text.text = self._decode(row)
            found = [position for stop in self._stop if (position := text.text.find(stop)) >= 0]
            if found:
                text.text, text.finish_reason = text.text[:min(found)], "stop"
        if self._on_text:
            end = len(text.text) if text.finish_reason else self._certain(text.text)
            self._on_text(text.text[self._printed:end])
            self._printed = max(self._printed, end)

    def _decode(self, row: int) -> str:
        """Return the text after the prompt, without the end token."""
        text = self._texts[row]
        tokens = text.tokens[:-1] if text.finish_reason == "eos" else text.tokens
        decode, before = self._loaded.tokenizer.decode, self._prompts[row]
        # Decoded alone, some tokenizers drop the first space.
        complete = decode(text.prompt.tokens + tokens)
        return complete[len(before):] if complete.startswith(before) else decode(tokens)

    def _certain(self, text: str) -> int:
        """Return the number of characters that later tokens cannot change, and that begin no stop text."""
        text = text.rstrip(_INCOMPLETE)
        begun = [size for stop in self._stop for size in range(1, len(stop)) if text.endswith(stop[:size])]
        return len(text) - max(begun, default=0)


def interact(loaded: LoadedModel, encode: Callable[[Prompt], EncodedPrompt], sampling: Sampling) -> None:
    """Read a prompt per line until end of file, and print what follows it.

    Ctrl-C ends the current text. While a prompt is read, it raises KeyboardInterrupt. A prompt that cannot be used is
    reported, and the next one is read.
    """
    index = 0
    while (line := _read_line()) is not None:
        try:
            text = Completion(encode(Prompt("prompt", line)), index)
        except ConfigError as error:
            say(str(error))
            continue
        try:
            generate_batch(loaded, [text], sampling, on_text=_print_piece)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        print(flush=True)
        index += 1


def _read_line() -> str | None:
    """Return the next line from standard input; None at its end."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("> ", end="", flush=True)
        # input() would not notice a Ctrl-C that the kernel delivers to one of torch's threads
        while not select.select([sys.stdin], [], [], _POLL_S)[0]:
            pass
    line = sys.stdin.readline()
    if terminal and not line:
        print()  # after Ctrl-D, the shell's prompt begins on a new line
    return line.rstrip("\r\n") if line else None


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)
