"""Steps that extensions add to `ds-pretrain prepare`: a `DocumentStep`, and the `Documents` that it gets.

The points of a preparation, in their order:

    start       main process: the tokenizer is loaded, and no input is read yet
    encoder     workers: turns texts into tokens
    measure     workers: numbers about texts
    keep        main process, for all documents in the order of the inputs: which of them are kept
    report      main process, after the last document: what the .meta.json and the .summary.json say
    lines       main process: what the command prints of the summary

The files are the same for any number of workers, after any kill, and if shards are merged. For this, `encoder` and
`measure` depend on the texts and on attributes that `__init__` and `start` have set, and `keep` also on `state` and
`file`, which a preparation stores and restores. `keep` is not called while a shard is made: the numbers of each
document are stored in the shard, and the merge calls `keep` for the documents of all shards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from pretrain.data.prepare.hash_tables import DIGEST_BYTES, Digests
from pretrain.data.prepare.partial_output import AppendFile

if TYPE_CHECKING:
    from pretrain.data.prepare.summary import Statistics
    from pretrain.data.text_inputs.find import Input
    from pretrain.data.tokenizers.tokenizer import Tokenizer

ORIGIN = np.dtype([("input", "<i4"), ("line", "<i8")])
"""number of a document's input, and its line or row in it"""
Origins = npt.NDArray[np.void]
Encode = Callable[[Sequence[str], Sequence[bool]], tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
"""texts, and whether each is a complete document -> tokens of all texts, and the position at which each text ends"""
Column = tuple[str, int]
"""numpy's name of a type of numbers, such as <u4, and how many of them a document has"""


@dataclass(frozen=True)
class InputFile:
    """Name and source of an input, for the places and counts of its documents."""

    name: str
    source: str
    """the word of the command line that names the input"""
    has_rows: bool

    @classmethod
    def of(cls, found: "Input") -> "InputFile":
        """Return name and source of an input that was found."""
        return cls(found.name, found.source or found.name, found.kind in ("parquet", "rows"))

    def place(self, line: int) -> str:
        """Return the place of a document, for people."""
        return f"{self.name}: row {line}" if self.has_rows else f"{self.name}:{line}"


@dataclass(frozen=True)
class Documents:
    """Some documents, in the order of the inputs: an entry for each."""

    num_tokens: npt.NDArray[np.int64]
    """[n], BOS and end-of-document tokens included"""
    text_bytes: npt.NDArray[np.int64]
    """bytes of the texts [n]"""
    digests: Digests
    """hashes of the tokens [n, 2]"""
    origins: Origins
    """[n]"""
    values: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """name of a step -> the numbers of its column [n, count]"""
    is_new: npt.NDArray[np.bool_] | None = None
    """whether no earlier document has the same tokens [n]; None: exact duplicates are not counted"""

    def __len__(self) -> int:
        return len(self.num_tokens)

    def __getitem__(self, index: "slice | npt.NDArray[Any]") -> "Documents":
        return Documents(self.num_tokens[index], self.text_bytes[index], self.digests[index], self.origins[index],
                         {name: values[index] for name, values in self.values.items()},
                         None if self.is_new is None else self.is_new[index])

    def rows(self, columns: "Mapping[str, Column]") -> npt.NDArray[np.void]:
        """Return the rows of a shard, OUT.shard-I-of-N.documents."""
        rows = np.zeros(len(self), row_type(columns))
        rows["text_bytes"], rows["digests"], rows["origins"] = self.text_bytes, self.digests, self.origins
        for name, (base, _) in columns.items():
            rows[name] = self.values[name].astype(base)
        return rows


def row_type(columns: Mapping[str, Sequence[Any]]) -> "np.dtype[np.void]":
    """Return the type of the rows of a shard whose steps have these columns. The tokens are in the .bin."""
    more: list[Any] = [(name, base, (count,)) for name, (base, count) in columns.items()]
    return np.dtype([("text_bytes", "<i8"), ("digests", "<u8", (DIGEST_BYTES // 8,)), ("origins", ORIGIN), *more])


class DocumentStep:
    """A step of a preparation that an extension brings: see Extension.documents. Override what you need."""

    name = ""
    """name of the extension, or another one that no other step has: in states and shards"""
    order: ClassVar[float] = 50
    """Steps run in this order (ties: by name): later ones get the texts and documents that the earlier ones leave."""
    column: Column | None = None
    """what `measure` returns of a text, with the type that `keep` gets and shards store; None: nothing is measured"""
    combine: ClassVar[np.ufunc] = np.add
    """combines the numbers of the parts of a long document; the numbers of the text "" must not change others"""
    has_file = False
    """whether the step has a `file`"""
    exact_duplicates = ""
    """"remove": exact duplicates are removed, as with --deduplicate; "count": they are counted, however many"""
    special_tokens: tuple[str, ...] = ()
    """names of tokens that a tokenizer which the command trains must have"""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: JSON values by flag. A resume and all shards must have the same ones; the summary has them."""
        self.settings = dict(settings)
        self.state: dict[str, Any] = {}
        """JSON values, stored with the documents so far; a merge begins with those that `start` has left"""
        self.inputs: Sequence[InputFile] = ()
        """all inputs, by the numbers in `Documents.origins`; set before `keep`"""
        self.file: AppendFile | None = None
        """a file that only grows, stored with the documents so far; set before `keep`"""

    def start(self, tokenizer: "Tokenizer") -> None:
        """Check whether the step is possible. It may add to `settings` and `state`. Raises ConfigError."""

    def encoder(self, tokenizer: "Tokenizer", encode: Encode) -> Encode:
        """Return the function that encodes texts, for example with a changed text. `encode` does so without it."""
        return encode

    def measure(self, texts: Sequence[str]) -> npt.ArrayLike:
        """Return the numbers of each text, as it was read: [n, count] for the step's column."""
        return np.zeros((len(texts), 0))

    def keep(self, documents: Documents, values: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
        """Return whether each document is kept [n]; None: all are. `values` are the numbers of the step's column.

        They are the documents that are not empty and that earlier steps and --deduplicate have kept.
        """
        return None

    def report(self, meta: dict[str, Any], summary: dict[str, Any], statistics: "Statistics") -> None:
        """Add to the contents of the .meta.json and of the .summary.json: JSON values that have no times.

        Data sets that are merged or split from this one keep what was added to `meta`, without the keys in it that
        begin with "documents": they are counts of this data set alone.
        """

    def lines(self, summary: Mapping[str, Any], file: str) -> list[str]:
        """Return lines about a .summary.json for people (`summary_row`). file: its path."""
        return []
