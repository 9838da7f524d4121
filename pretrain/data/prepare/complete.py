"""Complete the files of a data set after its last document: of a preparation, a shard of one, or merged shards."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pretrain.data.prepare.document_writer import DocumentWriter
from pretrain.data.prepare.duplicates.near_duplicates import NearSettings
from pretrain.data.prepare.partial_output import PartialOutput
from pretrain.data.prepare.summary import entropy_nats, make_summary
from pretrain.data.token_files.writer import complete_files
from pretrain.errors import ConfigError


@dataclass(frozen=True)
class PreparedData:
    """Content of PREFIX.meta.json."""

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
    fill_in_middle: dict[str, Any] = field(default_factory=dict)
    """settings and tokens of --fim_rate, and the number of documents; {} without it"""


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
    fill_in_middle: dict[str, Any] | None = None
    commits: dict[str, str] = field(default_factory=dict)
    """of inputs on the Hub: "hf://REPOSITORY@REVISION" -> the commit that is read"""

    @property
    def special_tokens(self) -> int:
        """Number of tokens that a document has besides the tokens of its text."""
        return (self.bos_token is not None) + (self.eod_token is not None)

    @property
    def deduplicate(self) -> bool:
        """True if exact duplicates are removed. They are near-duplicates, too."""
        return bool(self.record["--deduplicate"]) or self.record["--near_duplicates"] == "remove"

    @property
    def near(self) -> NearSettings | None:
        """Settings of near-duplicates; None: they are not looked for."""
        choice = self.record["--near_duplicates"]
        return None if choice is None else NearSettings(float(self.record["--near_threshold"]), choice == "remove")

    @property
    def filters(self) -> dict[str, Any]:
        """The settings that leave out or change documents."""
        record = self.record
        near = {name: record[f"--{name}"] for name in ("near_duplicates", "near_threshold")}
        return {"on_error": "skip" if record["skip_errors"] else "stop", "deduplicate": record["--deduplicate"],
                **(near if record["--near_duplicates"] else {})}

    def of_all_shards(self) -> dict[str, Any]:
        """Return what must be the same for all shards. --on_error has no effect on a shard without errors."""
        other = ("record", "tokenizer", "inputs")
        facts = {name: value for name, value in asdict(self).items() if name not in other}
        return {**{name: value for name, value in self.record.items() if name != "skip_errors"}, **facts}


def check_not_empty(writer: DocumentWriter, inputs: str) -> None:
    """Raise ConfigError if no document was written."""
    if writer.num_documents == 0:
        raise ConfigError(inputs, problem="there is no document that is not empty")


def complete_output(output: PartialOutput, writer: DocumentWriter, facts: DataFacts, *,
                    is_shard: bool = False) -> PreparedData:
    """Complete all files in the partial output, and return the content of the .meta.json. Raises OSError."""
    statistics = writer.statistics
    middle = dict[str, Any]()
    if facts.fill_in_middle is not None:
        # Each rearranged document has each of the tokens once, and no other text has them.
        number = int(statistics.token_counts[facts.fill_in_middle["tokens"]["middle"]])
        middle = {**facts.fill_in_middle, "documents": number, "documents_read_in_parts": statistics.divided}
    meta = PreparedData(
        vocab_size=facts.vocab_size, tokenizer=facts.tokenizer, tokenizer_sha256=facts.tokenizer_sha256,
        bos_token=facts.bos_token, eod_token=facts.eod_token, num_tokens=statistics.tokens,
        num_documents=statistics.documents, max_token=int(np.flatnonzero(statistics.token_counts).max(initial=0)),
        entropy_nats=entropy_nats(statistics.token_counts), sources=facts.sources, filters=facts.filters,
        fill_in_middle=middle)
    summary = make_summary(
        statistics, unknown_token=facts.unknown_token, duplicates_counted=writer.duplicates_are_counted,
        deduplicated=facts.deduplicate, near=None if is_shard else facts.near,
        entropy_nats=meta.entropy_nats, inputs=facts.inputs, settings={**facts.record, "tokenizer": meta.tokenizer})
    complete_files(output.data_files, facts.dtype, output.path / "lengths", blocks=writer.finish(),
                   meta=asdict(meta), summary=summary | ({"fill_in_middle": middle} if middle else {}))
    return meta
