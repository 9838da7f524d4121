"""lm-eval's view of the model that trains: it asks for log-likelihoods, which the engine of the run computes.

It encodes texts, and cuts those that are too long, as HFLM of lm-eval 0.4.13 (models/huggingface.py) does, so that a
task has the scores that `ds-pretrain evaluate --tasks` gives for a checkpoint.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

Pair = tuple[list[int], list[int]]
"""tokens of the context, at least one, and of its continuation"""
Answer = tuple[float, bool]
"""log-likelihood of the continuation (nats), and whether greedy decoding would give it"""
OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")


class EngineLM(TemplateLM):
    """A model for lm-eval.

    Args:
        tokenizer: as transformers loads it.
        max_length: largest number of tokens that the model sees at once.
        score: returns the answers for pairs.
    """

    def __init__(self, tokenizer: Any, max_length: int, score: Callable[[Sequence[Pair]], list[Answer]]) -> None:
        super().__init__()
        self.tokenizer, self._max_length, self._score = tokenizer, max_length, score

    @property
    def eot_token_id(self) -> Any:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        bos = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        prefix = self.prefix_token_id
        if add_special_tokens is None and prefix is not None and string.startswith(self.tokenizer.decode(prefix)):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Answer]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows = [[make_disjoint_window(window) for window in get_rolling_token_windows(
            token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
            max_seq_len=self._max_length, context_len=1)] for request in requests]
        answers = iter(self._score([window for of_request in windows for window in of_request]))
        return [sum(next(answers)[0] for _ in of_request) for of_request in windows]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("run_tasks.py rejects tasks that generate text")
