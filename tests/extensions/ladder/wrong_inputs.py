"""Wrong inputs to a run with --expected_curve: see tests/wrong_inputs/inputs.py."""

import json
from pathlib import Path
from typing import Any

from pretrain.model.config import load_model_config
from tests.extensions.ladder.used import ladder_of
from tests.wrong_inputs.case import NOTHING

TOOLS = {"ladder": ["--target", "{world}/target.yaml", "--budget", "1h", "--out", "{world}/out"]}
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(({}, {"expected_curve": f"{{world}}/{file}"}, f"--expected_curve: {problem}") for file, problem in (
        ("none.json", "{world}/none.json cannot be used: No such file or directory. Write it with ds-pretrain "
                      "ladder"),
        ("list.json", " ... it is [] instead of an object"), ("broken.json", " ... cannot be used: "),
        ("ladder-format.json", ' ... its "format" is not "ds-pretrain ladder 1"'),
        ("ladder-short.json", " ... target.curve has fewer than two points"),
        ("ladder-text.json", ' ... target.curve[0].loss is "low" instead of a number'),
        ("ladder-vocabulary.json", "the ladder is for a vocabulary of 7 tokens, and this run has "),
        ("ladder-family.json", "the ladder is for the family llama, and this run has gpt2"),
        ("ladder-parameters.json", "the ladder is for 1,500,000,000 parameters (without embeddings and head), "),
        ("ladder-batch.json", "the ladder is for 128 tokens in a step, and this run has 64. Use the batch of"),
        ("ladder-data.json", "the ladder is for the data other (abababab), and this run has corpus ("))),
    ({}, {"expected_curve": "{world}/ladder-right.json", "label_smoothing": 0.1},
     "--expected_curve / --label_smooth"),
    ({}, {"expected_curve": "{world}/ladder-right.json", "init_from": "{world}/hf", "model": NOTHING},
     "--expected_curve / --init_from: found both"),
]


def write_files(folder: Path) -> None:
    """Write what a run reads of a ladder.json, with one value that makes it the prediction of another run."""
    right = ladder_of(load_model_config("tiny"), folder / "corpus")
    target, curve = right["target"], right["target"]["curve"]
    for name, changes in {"right": {}, "format": {"format": "ds-pretrain ladder 0"}, "vocabulary": {"vocab_size": 7},
                          "family": {"family": "llama"}, "data": {"corpus": {"other": "ab" * 32}},
                          "parameters": {"target": {**target, "parameters": 1.5e9}},
                          "batch": {"target": {**target, "tokens_per_step": 128.0}},
                          "short": {"target": {**target, "curve": curve[:1]}},
                          "text": {"target": {**target, "curve": [{**curve[0], "loss": "low"}]}}}.items():
        (folder / f"ladder-{name}.json").write_text(json.dumps({**right, **changes}))
