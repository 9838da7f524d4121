"""Positions of tokens inside their documents."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pretrain.data.loader import document_positions

EOD = 0


@given(st.integers(1, 4).flatmap(lambda rows: st.integers(1, 12).flatmap(lambda length: st.lists(
    st.lists(st.integers(EOD, 2), min_size=length, max_size=length), min_size=rows, max_size=rows))))
def test_positions_begin_at_0_with_each_sample_and_after_each_eod(samples: list[list[int]]) -> None:
    expected = []
    for sample in samples:
        position, row = 0, []
        for token in sample:
            row.append(position)
            position = 0 if token == EOD else position + 1
        expected.append(row)
    positions_BT = document_positions(np.array(samples), EOD)
    assert positions_BT.dtype == np.int64
    assert positions_BT.tolist() == expected
