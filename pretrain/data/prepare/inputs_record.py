"""Sizes and modification times of the inputs, by which a resume and a reader of the summary recognize them."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from pretrain.data.inputs.find import Input
from pretrain.errors import ConfigError

_MOST_LISTED = 1000


def record_inputs(inputs: Sequence[Input]) -> dict[str, Any]:
    """Return {"files": number, "bytes": sum, "sha256": of the list, "list": [[path, bytes, mtime_ns], ...]}.

    The list is left out if it has over 1,000 files. Standard input has neither size nor time. Raises ConfigError.
    """
    digest, listed, total = hashlib.sha256(), [], 0
    for found in inputs:
        entry: list[Any] = [found.path, None, None]
        if found.can_resume:
            try:
                status = os.stat(found.path)
            except OSError as error:
                raise ConfigError(found.path, problem=f"it cannot be read: {error.strerror}") from None
            entry[1:] = status.st_size, status.st_mtime_ns
            total += status.st_size
        digest.update(json.dumps(entry).encode() + b"\n")
        if len(inputs) <= _MOST_LISTED:
            listed.append(entry)
    return {"files": len(inputs), "bytes": total, "sha256": digest.hexdigest(), "list": listed}


def changed_input(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the path of the first input that two records differ in; "inputs" if other files were listed, or none."""
    paths = [[entry[0] for entry in record["list"]] for record in (before, after)]
    if paths[0] != paths[1]:
        return "inputs"
    pairs = zip(before["list"], after["list"], strict=True)
    return next((str(old[0]) for old, new in pairs if list(old) != list(new)), "inputs")
