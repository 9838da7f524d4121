"""Where the documents of a data set come from, and what left out or changed documents, as its .meta.json says.

Data sets that are made from it (by `data merge` and `split`, for example) keep these facts.
"""

from collections.abc import Sequence
from typing import Any

from pretrain.data.data_spec import absolute_words
from pretrain.data.token_files.indexed_dataset import IndexedDataset

MERGED_FROM = "merged_from"
_KEYS = ("sources", "filters", "fill_in_middle")
_WITHOUT = "without_"  # begins the keys of documents that were removed from a data set
_COUNTS = ("documents", "documents_read_in_parts")  # in fill_in_middle: of the prepared data set alone
_MOST_LISTED = 1000  # inputs in the .meta.json of merged data


def provenance(data: IndexedDataset) -> dict[str, Any]:
    """Return these facts without counts, which are of this data set alone; {} if there are none."""
    keys = (*_KEYS, *(key for key in data.meta if key.startswith(_WITHOUT)), MERGED_FROM)
    found = {key: data.meta[key] for key in keys if data.meta.get(key)}
    if isinstance(middle := found.get("fill_in_middle"), dict):
        found["fill_in_middle"] = {key: value for key, value in middle.items() if key not in _COUNTS}
    return found


def merged_provenance(datasets: Sequence[IndexedDataset]) -> dict[str, Any]:
    """Return the facts that all data sets share, and under "merged_from" the others of each data set."""
    each = [provenance(data) for data in datasets]
    shared = {key: value for key, value in each[0].items() if all(found.get(key) == value for found in each)}
    own = [{key: value for key, value in found.items() if key not in shared} for found in each]
    if not any(own):
        return shared
    lists = [found["sources"]["list"] for found in own
             if isinstance(found.get("sources"), dict) and isinstance(found["sources"].get("list"), list)]
    if sum(map(len, lists)) > _MOST_LISTED:
        for found in own:
            if isinstance(found.get("sources"), dict):
                found["sources"] = {key: value for key, value in found["sources"].items() if key != "list"}
    return {**shared, MERGED_FROM: [{"data": absolute_words(str(data.prefix)), "documents": data.num_documents, **found}
                                    for data, found in zip(datasets, own, strict=True)]}
