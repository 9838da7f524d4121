"""Positions of tokens inside their documents, for --document_attention.

Shapes: B samples, T sequence length.
"""

import numpy as np
import numpy.typing as npt


def document_positions(tokens_BT: npt.NDArray[np.int64], eod_token: int) -> npt.NDArray[np.int64]:
    """Return the position of each token inside its document, [B, T].

    Positions begin at 0 with each sample, and again after each eod_token. The eod_token is the last token of its
    document. A document that began in an earlier sample begins here at 0 too.
    """
    starts_BT = np.empty(tokens_BT.shape, bool)
    starts_BT[:, :1] = True
    np.equal(tokens_BT[:, :-1], eod_token, out=starts_BT[:, 1:])
    starts = np.flatnonzero(starts_BT)
    lengths = np.diff(starts, append=tokens_BT.size)
    return (np.arange(tokens_BT.size) - np.repeat(starts, lengths)).reshape(tokens_BT.shape)
