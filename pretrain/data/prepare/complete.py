"""Complete the files of a data set after its last document: of a preparation, a shard of one, or merged shards."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from pretrain.data.prepare.document_step import DocumentStep
from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.partial_output import PartialOutput
from pretrain.data.prepare.summary import entropy_nats, make_summary
from pretrain.data.token_files.writer import complete_files
from pretrain.errors import ConfigError
from pretrain.stored_json import build


@dataclass(frozen=True)
class PreparedData:
    """Content of PREFIX.meta.json, apart from what steps of extensions add to it."""

    vocab_size: int
    tokenizer: str
    """path of the tokenizer's file"""
    tokenizer_sha256: str
    bos_token: int | None
    """the token that begins each document; None without --prepend_bos"""
    eod_token: int | None
    """the token that ends each document; None without --append_eod"""
    num_tokens: int
    num_documents: int
    max_token: int
    entropy_nats: float
    """entropy per token of the token frequencies: the loss of a model that predicts these frequencies"""
    sources: dict[str, Any]
    """the inputs: paths or URLs, sizes and versions"""
    filters: dict[str, Any]
    """settings that leave out or change documents"""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "PreparedData":
        """Return the content of a .meta.json. Raises KeyError and ValueError."""
        return build(cls, {each.name: meta[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class DataFacts:
    """Facts about a data set before its inputs are read. Each shard stores it for the merge."""

    vocab_size: int
    tokenizer: str
    tokenizer_sha256: str
    bos_token: int | None
    eod_token: int | None
    unknown_token: int | None
    dtype: str
    inputs: str
    """a line about the inputs, for the summary"""
    record: dict[str, Any]
    """settings and inputs that must be the same for a resume, and for all shards"""
    sources: dict[str, Any]
    deduplicate: bool
    """whether exact duplicates are removed: --deduplicate, or a step that asks for it"""
    states: dict[str, dict[str, Any]]
    """state of each step of an extension before the first document"""
    columns: dict[str, list[Any]]
    """`DocumentStep.column` of the steps that have one"""
    commits: dict[str, str] = field(default_factory=dict)
    """inputs on the Hub: "hf://REPOSITORY@REVISION" -> the commit that is read"""

    @property
    def special_tokens(self) -> int:
        """Number of tokens that a document has besides the tokens of its text."""
        return (self.bos_token is not None) + (self.eod_token is not None)

    @property
    def filters(self) -> dict[str, Any]:
        """The settings that leave out documents."""
        return {"on_error": "skip" if self.record["skip_errors"] else "stop",
                "deduplicate": self.record["--deduplicate"]}

    def of_all_shards(self) -> dict[str, Any]:
        """Return what must be the same for all shards. --on_error has no effect on a shard without errors."""
        other = ("record", "tokenizer", "inputs", "deduplicate", "states", "columns")
        facts = {name: value for name, value in asdict(self).items() if name not in other}
        return {**{name: value for name, value in self.record.items() if name != "skip_errors"}, **facts}


def check_not_empty(writer: DocumentWriter, inputs: str) -> None:
    """Raise ConfigError if no document was written."""
    if writer.num_documents == 0:
        raise ConfigError(inputs, problem="there is no document that is not empty")


def complete_output(output: PartialOutput, writer: DocumentWriter, facts: DataFacts,
                    steps: Sequence[DocumentStep]) -> dict[str, Any]:
    """Complete all files in the partial output, and return the content of the .meta.json. Raises OSError."""
    statistics = writer.statistics
    data = PreparedData(
        vocab_size=facts.vocab_size, tokenizer=facts.tokenizer, tokenizer_sha256=facts.tokenizer_sha256,
        bos_token=facts.bos_token, eod_token=facts.eod_token, num_tokens=statistics.tokens,
        num_documents=statistics.documents, max_token=int(np.flatnonzero(statistics.token_counts).max(initial=0)),
        entropy_nats=entropy_nats(statistics.token_counts), sources=facts.sources, filters=facts.filters)
    summary = make_summary(
        statistics, unknown_token=facts.unknown_token, duplicates_counted=writer.duplicates_are_counted,
        deduplicated=facts.deduplicate, entropy_nats=data.entropy_nats, inputs=facts.inputs,
        settings={**facts.record, "tokenizer": facts.tokenizer})
    meta = asdict(data)
    for step in steps:
        step.report(meta, summary, statistics)
    complete_files(output.data_files, facts.dtype, output.path / "lengths", blocks=writer.finish(),
                   meta=meta, summary=summary)
    return meta
