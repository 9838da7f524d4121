"""--compile_blocks on real engines of two ranks: equal losses, one graph, and no matrices that ZeRO-3 cannot free.

The backend "aot_eager" traces and partitions the graphs, and runs them without compiling.
"""

from typing import Any

import pytest

from tests.support.cases import DROPOUT, case, config, flags
from tests.support.launch import run_worker
from tests.support.layouts import relative_difference

_TENSOR = {"tensor_parallel": {"autotp_size": 2}}
_DOCUMENTS, _TWO_STAGES = {"document_attention": "true"}, {"stages": 2, "micro": 4, "accumulation": 4}
# without a compiler; the losses of a model do not depend on the layout
PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": (config(3, param_persistence_threshold=0), {}),
    "documents": (config(2), _DOCUMENTS),
}
COMPILED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # (name in PLAIN, JSON, flags)
    "zero0": ("fp32", config(0), {}),
    "zero3": ("fp32", config(3, param_persistence_threshold=0), {}),
    "zero3_recomputed_attention": ("fp32", config(3), {"recompute": "attention"}),
    "zero3_documents_recomputed": ("documents", config(3, param_persistence_threshold=0),
                                   {**_DOCUMENTS, "recompute": "blocks"}),
    "pipeline2_zero1_documents": ("documents", config(1, **_TWO_STAGES), _DOCUMENTS),
    "tensor2_zero1": ("documents", config(1, accumulation=4) | _TENSOR, _DOCUMENTS),
    "zero3_tensor2_recomputed": ("fp32", config(3, accumulation=4, param_persistence_threshold=0) | _TENSOR,
                                 {"recompute": "mlp"}),
    "pipeline2_groups": ("fp32", config(0, checkpoint_every=1, **_TWO_STAGES), {}),
}


@pytest.fixture(scope="module")
def results(corpus, tmp_path_factory):
    def train(name: str, values: dict[str, Any], **extra: str) -> dict[str, Any]:
        return case(name, "train", values, flags(corpus, layers=2, steps=2, **extra))

    compiled = {"compile_blocks": "true"}
    cases = [train(name, values, **extra) for name, (values, extra) in PLAIN.items()]
    cases += [train(name, values, **extra, **compiled) for name, (_, values, extra) in COMPILED.items()]
    # the masks of dropout differ from those without a compiler
    cases += [train(f"dropout_{start}", config(3), overrides=DROPOUT, **compiled) for start in range(2)]
    return run_worker("compile_worker.py", cases, 2, tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", COMPILED)
def test_losses_are_equal_and_blocks_share_one_graph(name, results):
    plain, compiled = results[COMPILED[name][0]], results[name]
    assert relative_difference(compiled["loss"], plain["loss"]) < 1e-5
    assert relative_difference(compiled["grad_norm"], plain["grad_norm"]) < 1e-4
    assert relative_difference([compiled["eval"]], [plain["eval"]]) < 1e-5
    assert plain["graphs"] == 0
    assert (compiled["graphs"], compiled["breaks"]) == (2, 0)  # training and evaluation
    assert (compiled["saved_weights"] > 0) == name.startswith("zero3")
    views = 64 if "tensor2" in name else 0  # elements: the ranks sum gradients of norms and biases behind a view
    assert compiled["largest_kept_weight"] <= views


def test_dropout_of_compiled_blocks_is_the_same_in_each_start(results):
    first, second = (results[f"dropout_{start}"] for start in range(2))
    assert first["loss"] == second["loss"]
    assert first["breaks"] == 0
