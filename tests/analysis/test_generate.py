"""Text generation from checkpoints that real engines wrote, compared with transformers and with our own module.

The checkpoints are of ZeRO-3 on 2 ranks and of 2 pipeline stages. Layers on several GPUs cannot be tested without GPUs:
a device map over two names of the CPU runs the same code of transformers and accelerate, but copies nothing between
devices.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.analysis.generate.source import find_source
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.data.tokenizer import load_tokenizer
from pretrain.model.config import ModelConfig
from pretrain.model.hf_weights import to_transformers
from pretrain.model.layer_specs import as_module
from tests.support.cases import case, flags
from tests.support.layouts import dp2, pp2, run_layouts
from tests.support.model_shapes import SHAPES, write_config
from tests.wrong_inputs.case import main_of

FAMILIES = [name for name in ("llama", "gpt2", "neox_parallel") if name in SHAPES]
VOCAB, MODEL_VOCAB = 256, 260  # of the tokenizer; the model has 4 rows without a token
PROMPT, NEW = 20, 30  # tokens
LETTERS = [chr(0x100 + token) for token in range(VOCAB)]  # the text of each token


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer.json in which each token is a letter, and return its path. Token 0 ends a document."""
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    vocab = {"<|endoftext|>": 0, **{letter: token for token, letter in enumerate(LETTERS) if token}}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    special = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        "pre_tokenizer": split, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": LETTERS[1]}}))
    return path


@pytest.fixture(scope="module")
def checkpoints(corpus: str, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return {"family-layout": checkpoint folder}. Each run has one step, and large initial weights."""
    folder = tmp_path_factory.mktemp("generate")
    cases = {}
    for family in FAMILIES:
        model = write_config(folder / family, {**SHAPES[family], "vocab_size": MODEL_VOCAB, "initializer_range": 0.2})
        for layout, values in {"zero3": dp2(3), "pipeline": pp2(1)}.items():
            name = f"{family}-{layout}"
            run_flags = {**flags(corpus, steps=1), "model": model, "seq_length": 32}
            del run_flags["model_overrides"]
            cases[name] = (2, case(name, "train_and_save", values, run_flags, saved_step=1))
    results = run_layouts(cases, folder)
    for name in cases:
        run = Path(results[name]["folder"]).parents[1]
        (run / "run.json").write_text(json.dumps([{"flags": {"tokenizer": str(tokenizer)}}]))
    return {name: Path(results[name]["folder"]) for name in cases}


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS[token] for token in tokens)


PROMPTS = [text_of([7 + 3 * step % 90 for step in range(PROMPT)]), text_of([200, 100, 3]), text_of([50] * 11)]


def run_tool(words: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run tools/generate.py in this process, and return what it prints."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, words)])
    main_of("tools/generate.py")()
    return capsys.readouterr().out


def json_rows(words: list[Any], capsys: pytest.CaptureFixture[str],
              monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_tool([*words, "--json"], capsys, monkeypatch).splitlines()]


def greedy(checkpoint: Path) -> list[Any]:
    return [checkpoint, "--temperature", 0, "--max_new_tokens", NEW, *(f"--prompt={prompt}" for prompt in PROMPTS)]


def argmax_of_our_module(config: ModelConfig, weights: dict[str, torch.Tensor], tokens: list[int]) -> list[int]:
    """Return greedy tokens from our module, which computes all positions again for each token."""
    module = as_module(config).eval()
    module.load_state_dict(weights)
    new: list[int] = []
    with torch.no_grad():
        while len(new) < NEW and new[-1:] != [0]:
            new.append(int(module(torch.tensor([tokens + new]))[0, -1, :VOCAB].argmax()))
    return new


def greedy_of_transformers(config: ModelConfig, weights: dict[str, torch.Tensor], tokens: list[int]) -> list[int]:
    """Return greedy tokens from the transformers model with the exported weights."""
    values = {key: value for key, value in config.hf_config.items() if key != "model_type"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.architecture, **values), dtype=torch.float32).eval()
    model.load_state_dict(to_transformers(weights, config))
    output = model.generate(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                            do_sample=False, max_new_tokens=NEW, eos_token_id=0, pad_token_id=0,
                            suppress_tokens=list(range(VOCAB, MODEL_VOCAB)))
    return list(map(int, output[0, len(tokens):]))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, checkpoints: dict[str, Path], tokenizer: Path,
                                                 capsys: pytest.CaptureFixture[str],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layouts, with and without cache, alone and in a batch with padding."""
    encode = load_tokenizer(tokenizer).encode
    for layout in ("zero3", "pipeline"):
        checkpoint = checkpoints[f"{family}-{layout}"]
        source = find_source(checkpoint)
        assert source.config is not None
        weights = CheckpointReader(checkpoint).weights()
        expected = [greedy_of_transformers(source.config, weights, encode(prompt)) for prompt in PROMPTS]
        assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
        assert len(set(expected[0])) > 5, "the text repeats itself, and so would hide errors"
        assert [argmax_of_our_module(source.config, weights, encode(prompt)) for prompt in PROMPTS] == expected
        for words in ([], ["--no_cache"], ["--batch_size", 1]):
            rows = json_rows([*greedy(checkpoint), *words], capsys, monkeypatch)
            assert [row["tokens"] for row in rows] == expected, (layout, words)
        assert [row["prompt"] for row in rows] == PROMPTS
