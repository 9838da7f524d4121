"""Steps of a preparation that use all of DocumentStep, for tests of its contract."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import Documents, DocumentStep, Encode
from pretrain.data.prepare.summary import Statistics, summary_row
from pretrain.data.tokenizers.tokenizer import Tokenizer


class Shout(DocumentStep):
    """Writes complete documents that begin with a vowel in capital letters."""

    name = "shout"

    def __init__(self) -> None:
        super().__init__({"--shout": True})

    def start(self, tokenizer: Tokenizer) -> None:
        self.state = {"vocab_size": tokenizer.vocab_size}  # a merge has no tokenizer

    def encoder(self, tokenizer: Tokenizer, encode: Encode) -> Encode:
        return lambda texts, is_document: encode(
            [text.upper() if is_complete and text[:1] in {*"aeiou"} else text
             for text, is_complete in zip(texts, is_document, strict=True)], is_document)

    def report(self, meta: dict[str, Any], summary: dict[str, Any], statistics: Statistics) -> None:
        meta["shout"] = self.state


class Length(DocumentStep):
    """Removes documents whose number of words an earlier one has."""

    name = "length"
    order = 10
    column = "<u4", 2
    has_file = True

    def __init__(self, exact: str = "") -> None:
        super().__init__({"--length": exact})
        self.exact_duplicates = exact
        self._seen: set[int] | None = None

    def measure(self, texts: Sequence[str]) -> list[list[int]]:
        return [[len(text.split()), len(text)] for text in texts]

    def keep(self, documents: Documents, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        assert self.file is not None
        assert len(values) == len(documents) == len(documents.num_tokens)
        if self._seen is None:
            self._seen = set(np.frombuffer(Path(self.file.path).read_bytes()[: self.file.size], "<u4").tolist())
        is_kept = np.ones(len(values), np.bool_)
        for number, (words, characters) in enumerate(values.tolist()):
            is_kept[number] = words not in self._seen
            self._seen.add(words)
            self.file.append(np.array([words] * int(is_kept[number]), "<u4").tobytes())
            origin, line = documents.origins[number].item()
            self.state["characters"] = self.state.get("characters", 0) + characters
            self.state["last"] = self.inputs[origin].place(line)
            if documents.is_new is not None:
                self.state["new"] = self.state.get("new", 0) + int(documents.is_new[number])
        return is_kept

    def report(self, meta: dict[str, Any], summary: dict[str, Any], statistics: Statistics) -> None:
        meta["filters"] |= self.settings
        summary["length"] = self.state

    def lines(self, summary: Mapping[str, Any], file: str) -> list[str]:
        return [summary_row("last", f"{summary['length'].get('last')} ({file})")]
