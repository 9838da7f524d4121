"""The step of a preparation that finds near-duplicates."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.document_step import Documents, DocumentStep
from pretrain.data.prepare.summary import Statistics, summary_row
from pretrain.data.tokenizers.tokenizer import Tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.near_duplicates.extension import THRESHOLD
from pretrain.extensions.near_duplicates.near_duplicates import NearDuplicates, make_records
from pretrain.extensions.near_duplicates.signatures import NUM_VALUES, sign, signature_version

_MOST_SAMPLES = 20
_SHOWN = 5


def steps(flags: Mapping[str, Any]) -> "list[NearDuplicateStep]":
    """Return the step. Raises ConfigError."""
    choice, threshold = flags.get("near_duplicates"), flags.get("near_threshold")
    if threshold is not None and choice is None:
        raise ConfigError("--near_threshold", problem="it has no effect without --near_duplicates",
                          remedy="give --near_duplicates remove, or count")
    return [NearDuplicateStep(choice, THRESHOLD if threshold is None else threshold)]


class NearDuplicateStep(DocumentStep):
    """Finds the near-duplicates, and removes them if `choice` is "remove". None: only the summary has a place for them.

    A shard cannot know which of its documents are near-duplicates: the merge finds them.
    """

    name = "near_duplicates"
    combine = np.minimum

    def __init__(self, choice: str | None, threshold: float = THRESHOLD) -> None:
        super().__init__({"--near_duplicates": choice, "--near_threshold": threshold if choice else None,
                          "version of rensa": None})
        self.is_used = self.has_file = choice is not None
        self.exact_duplicates = choice or ""
        self._threshold, self._removes = threshold, choice == "remove"
        if self.is_used:
            # low 16 bits of the values of a signature: the others make few equal ones different (2^-16)
            self.column = "<u2", NUM_VALUES
        self._index: NearDuplicates | None = None

    def start(self, tokenizer: Tokenizer) -> None:
        if self.is_used:
            self.settings["version of rensa"] = signature_version()

    def measure(self, texts: Sequence[str]) -> npt.ArrayLike:
        return sign(texts)

    def keep(self, documents: Documents, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        if not self.is_used:
            return None
        assert self.file is not None, "has_file"
        assert documents.is_new is not None, "exact duplicates are counted"
        self.state = self.state or {"documents": 0, "tokens": 0, "samples": [], "sources": {}}
        if self._index is None:
            self._index = NearDuplicates(self.file.path.with_name("bands"), self.file, self._threshold)
        new = np.flatnonzero(documents.is_new)
        is_near = np.zeros(len(documents), np.bool_)
        for found in self._index.add(make_records(documents.origins[new], values[new])):
            document = int(new[found.index])
            is_near[document] = True
            file, line = documents.origins[document].item()
            self._count(self.inputs[file].source, int(documents.num_tokens[document]), {
                "place": self.inputs[file].place(line),
                "earlier": self.inputs[found.earlier_input].place(found.earlier_line),
                "similarity": round(found.similarity, 4)})
        return ~is_near if self._removes else None

    def _count(self, source: str, num_tokens: int, sample: dict[str, Any]) -> None:
        self.state["documents"] += 1
        self.state["tokens"] += num_tokens
        self.state["sources"][source] = self.state["sources"].get(source, 0) + 1
        if len(self.state["samples"]) < _MOST_SAMPLES:
            self.state["samples"].append(sample)

    def report(self, meta: dict[str, Any], summary: dict[str, Any], statistics: Statistics) -> None:
        choice = self.settings["--near_duplicates"]
        if choice is not None:
            meta["filters"] |= {"near_duplicates": choice, "near_threshold": self._threshold}
        found, of_sources = None, self.state.get("sources", {})
        if self.state:
            found = {"documents": self.state["documents"], "tokens": self.state["tokens"], "removed": self._removes,
                     "threshold": self._threshold, "samples": self.state["samples"]}
        _insert(summary, "duplicates_removed", {"near_duplicates": found})
        _insert(summary["settings"], "--deduplicate", {name: summary["settings"][name] for name in self.settings})
        for row in summary["sources"]:
            _insert(row, "duplicates", {"near_duplicates": of_sources.get(row["source"], 0)})

    def lines(self, summary: Mapping[str, Any], file: str) -> list[str]:
        near = summary["near_duplicates"]
        if near is None:
            return []
        text = f"{near['documents']:,} of similarity {near['threshold']:g} or more"
        if near["documents"]:
            text += f" ({'removed' if near['removed'] else 'kept'}; {near['tokens']:,} tokens)"
        shown = near["samples"][:_SHOWN]
        more = [f"    ... the first {len(near['samples'])} are in {file}"] * (near["documents"] > len(shown))
        return [summary_row("near-duplicates", text), *(
            f"    {sample['place']}: {sample['similarity']:.2f} like {sample['earlier']}" for sample in shown), *more]


def _insert(values: dict[str, Any], after: str, new: Mapping[str, Any]) -> None:
    """Insert keys after another one, or move them there: the files have this order."""
    items = [item for item in values.items() if item[0] not in new]
    values.clear()
    for key, value in items:
        values[key] = value
        if key == after:
            values.update(new)
