"""The step of a preparation that rearranges documents."""

from collections.abc import Mapping
from typing import Any

from pretrain.data.prepare.document_step import DocumentStep, Encode
from pretrain.data.prepare.summary import Statistics, summary_row
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.fill_in_middle.fill_in_middle import (
    KNOWN_NAMES,
    Arrangement,
    FillInMiddle,
    FillInMiddleEncoder,
    make_arrangement,
)

_FLAGS = ("fim_tokens", "fim_spm_rate", "fim_seed")


def steps(flags: Mapping[str, Any]) -> "list[FillInMiddleStep]":
    """Return the step. Raises ConfigError."""
    tokens, spm_rate, seed = map(flags.get, _FLAGS)
    names = tokens.split(",") if tokens else None
    if names is not None and (len(names) != 3 or not all(names)):
        raise ConfigError("--fim_tokens", found=repr(tokens),
                          expected="the names of three tokens: PREFIX,MIDDLE,SUFFIX")
    if not (rate := flags.get("fim_rate")):
        given = [f"--{flag}" for flag in _FLAGS if flags.get(flag) is not None]
        if given and rate is None:
            raise ConfigError(given[0], problem="it has no effect without --fim_rate")
        return [FillInMiddleStep(None)]
    return [FillInMiddleStep(FillInMiddle(rate, 0.5 if spm_rate is None else spm_rate, seed or 0,
                                          (names[0], names[1], names[2]) if names else None))]


class FillInMiddleStep(DocumentStep):
    """Rearranges documents. None: only the .meta.json has a place for the settings."""

    name = "fill_in_middle"
    order = 90  # divides what other steps have made of a text

    def __init__(self, choice: FillInMiddle | None) -> None:
        super().__init__({})
        self._choice = choice
        self._arrangement: Arrangement | None = None
        if choice is not None:
            self.special_tokens = choice.names or KNOWN_NAMES[0]

    def start(self, tokenizer: Tokenizer) -> None:
        if self._choice is not None:
            self._arrangement = make_arrangement(tokenizer, self._choice)
            self.settings = {"--fim_rate": self._choice.rate, "--fim_spm_rate": self._choice.spm_rate,
                             "--fim_seed": self._choice.seed, "--fim_tokens": ",".join(self._arrangement.names)}
            self.state = self._arrangement.facts()

    def encoder(self, tokenizer: Tokenizer, encode: Encode) -> Encode:
        return encode if self._arrangement is None else FillInMiddleEncoder(tokenizer, self._arrangement, encode).encode

    def report(self, meta: dict[str, Any], summary: dict[str, Any], statistics: Statistics) -> None:
        meta["fill_in_middle"] = {}
        if self.state:
            # Each rearranged document has each of the tokens once, and no other text has them.
            number = int(statistics.token_counts[self.state["tokens"]["middle"]])
            meta["fill_in_middle"] = summary["fill_in_middle"] = {
                **self.state, "documents": number, "documents_read_in_parts": statistics.divided}

    def lines(self, summary: Mapping[str, Any], file: str) -> list[str]:
        if not (made := summary.get("fill_in_middle")):
            return []
        count, in_parts = made["documents"], made["documents_read_in_parts"]
        text = f"{count:,} documents ({count / max(summary['documents'], 1):.1%})"
        if in_parts:
            text += f"; {in_parts:,} long ones are read in parts, and not rearranged"
        return [summary_row("fill-in-the-middle", text)]
