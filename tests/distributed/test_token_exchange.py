"""Rows reach the rank of their expert, sorted by expert, and return; their gradients take the same ways back."""

from typing import Any

import numpy as np
import pytest

from tests.support.launch import run_worker

CASES = {  # rows of each rank for each expert
    2: {"uneven": [[3, 0, 5, 1], [2, 2, 0, 7]], "a rank that receives nothing": [[3, 1, 0, 0], [4, 0, 0, 0]],
        "a rank without rows": [[0, 0, 0, 0], [1, 2, 3, 4]], "no rows at all": [[0, 0], [0, 0]],
        "rows that stay": [[2, 0], [0, 2]]},
    4: {"four ranks": [[1, 0, 2, 3], [0, 0, 0, 0], [5, 1, 1, 1], [0, 9, 0, 1]]},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder, found = tmp_path_factory.mktemp("exchange"), {}
    for ranks, counts in CASES.items():
        cases = [{"name": f"{name} {dtype}", "counts": rows, "dtype": dtype}
                 for name, rows in counts.items() for dtype in ("float32", "bfloat16")]
        found |= run_worker("exchange_worker.py", cases, ranks, folder / str(ranks))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_rows_and_gradients_reach_the_experts_and_return(ranks: int, name: str, dtype: str,
                                                         results: dict[str, list[dict[str, Any]]]) -> None:
    of_ranks, counts = results[f"{name} {dtype}"], np.array(CASES[ranks][name])
    assert [row["received"] for row in of_ranks] == counts.sum(0).reshape(ranks, -1).tolist()
    assert all(row["rows"] and row["row_gradients"] for row in of_ranks)
    expected = np.sum([row["own"] for row in of_ranks], 0)  # of each expert
    found = np.concatenate([row["weight_gradients"] for row in of_ranks])
    np.testing.assert_allclose(found, expected, rtol=1e-5 if dtype == "float32" else 0.05, atol=1e-5
                               if dtype == "float32" else 0.1)
