"""Text generation from checkpoints that real engines wrote, compared with our own module.

The checkpoints are of ZeRO-3 on 2 ranks and of 2 pipeline stages. Layers on several GPUs cannot be tested without GPUs.
A device map over "cpu" and "disk" runs the same code of transformers and accelerate, except for copies between GPUs and
for the choice of each GPU's layers, which test_generate_inputs.py tests.
"""

import gzip
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.analysis.transformers_model import load_model
from pretrain.checkpoint.convert.export_hf import export_hf
from pretrain.checkpoint.convert.plan_export import plan_export
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.data.tokenizers.tokenizer import load_tokenizer
from pretrain.errors import ConfigError
from pretrain.extensions.generate import decode
from pretrain.extensions.generate.decode import Completion, LoadedModel, Sampling, generate, generate_batch
from pretrain.extensions.generate.prompts import EncodedPrompt, Prompt, encode_prompt
from pretrain.extensions.generate.source import GenerationSource, generation_source
from pretrain.model.config import ModelConfig
from pretrain.model.layer_specs import as_module
from tests.conftest import selected_params
from tests.extensions.generate.generation import VOCAB, GenerateTool, text_of, write_letters
from tests.support.cases import case, flags
from tests.support.layouts import dp2, pp2, run_layouts
from tests.support.model_shapes import SHAPES, write_config

USED = ("llama", "gpt2")  # in all tests
QUICK = (*USED, "neox_parallel", "mistral_multi_query", "qwen3_layer_types_bias_tied", "gemma2",
         "bloom_six_heads_untied")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if name not in QUICK]
MODEL_VOCAB = VOCAB + 4  # 4 rows of the embedding have no token
PROMPT, NEW = 20, 30  # tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture(scope="module")
def checkpoints(corpus: str, tokenizer: Path, request: pytest.FixtureRequest,
                tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return {"family-layout": checkpoint folder}. Each run has one step, and large initial weights."""
    folder = tmp_path_factory.mktemp("generate")
    cases = {}
    for family in dict.fromkeys((*USED, *selected_params(request, "family"))):
        shape = {**SHAPES[family], "vocab_size": MODEL_VOCAB, "initializer_range": 0.2}
        if "max_position_embeddings" in shape:
            shape["max_position_embeddings"] = 64
        if family.startswith(("gemma", "bloom")):
            shape["tie_word_embeddings"] = False  # else their large embeddings make the last token the most likely one
        model = write_config(folder / family, shape)
        for layout, values in {"zero3": dp2(3), **({"pipeline": pp2(1)} if family in USED else {})}.items():
            name = f"{family}-{layout}"
            run_flags = {**flags(corpus, steps=1), "model": model, "seq_length": 32}
            del run_flags["model_overrides"]
            cases[name] = (2, case(name, "train_and_save", values, run_flags, saved_step=1))
    results = run_layouts(cases, folder)
    for name in cases:
        run = Path(results[name]["folder"]).parents[1]
        (run / "run.json").write_text(json.dumps([{"flags": {"tokenizer": str(tokenizer)}}]))
    return {name: Path(results[name]["folder"]) for name in cases}


PROMPTS = [text_of([7 + 3 * step % 90 for step in range(PROMPT)]), text_of([200, 100, 3]), text_of([50] * 11)]


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


@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_greedy_tokens_are_those_of_our_module(family: str, checkpoints: dict[str, Path], tokenizer: Path,
                                                 tmp_path: Path, tool: GenerateTool) -> None:
    """Checkpoints and their exports, with and without cache, alone and in a batch with padding."""
    encode = load_tokenizer(tokenizer).encode
    for layout in ("zero3", "pipeline") if family in USED else ("zero3",):
        checkpoint = checkpoints[f"{family}-{layout}"]
        source = generation_source(checkpoint)
        assert source.config is not None
        weights = CheckpointReader(checkpoint).weights()
        exported = tmp_path / layout
        export_hf(plan_export(checkpoint, exported, dtype="fp32"))
        expected = [argmax_of_our_module(source.config, weights, encode(prompt)) for prompt in PROMPTS]
        assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
        assert sum(len(set(tokens)) for tokens in expected) > 10, "the texts repeat themselves and would hide errors"
        for model, *words in ((checkpoint,), (checkpoint, "--no_cache"), (checkpoint, "--batch_size", 1), (exported,)):
            rows = tool.rows(*greedy(model), *words)
            assert [row["tokens"] for row in rows] == expected, (model, words)
        assert [row["prompt"] for row in rows] == PROMPTS


def test_samples_depend_on_the_seed_and_not_on_the_batch(checkpoints: dict[str, Path], tool: GenerateTool) -> None:
    def sample(*words: Any) -> list[list[int]]:
        rows = tool.rows(checkpoints["llama-pipeline"], "--max_new_tokens", 12, "--num_samples", 3,
                         *(f"--prompt={prompt}" for prompt in PROMPTS[:2]), *words)
        return [row["tokens"] for row in rows]

    first = sample("--seed", 3)
    assert len({tuple(tokens) for tokens in first}) == 6
    assert sample("--seed", 3) == sample("--seed", 3, "--batch_size", 1) == sample("--seed", 3, "--no_cache") == first
    assert all(a != b for a, b in zip(sample("--seed", 4), first, strict=True))
    assert sample("--top_k", 1) == sample("--top_p", 1e-9) == sample("--temperature", 1e-9)


def test_sampled_tokens_have_the_probabilities_of_the_model(checkpoints: dict[str, Path]) -> None:
    """1,000 samples of one token, compared with softmax(logits / temperature) of our module over the top_k tokens."""
    source = generation_source(checkpoints["gpt2-zero3"])
    loaded = without_end_token(source)
    prompt = encode(source, PROMPTS[0])
    rows = generate(loaded, [prompt], Sampling(max_new_tokens=1, temperature=3.0, top_k=5, top_p=1.0),
                    num_samples=1000, batch_size=1000)
    counts = torch.bincount(torch.tensor([row.tokens[0] for row in rows]), minlength=MODEL_VOCAB) / 1000
    assert source.config is not None
    module = as_module(source.config).eval()
    module.load_state_dict(CheckpointReader(source.folder).weights())
    with torch.no_grad():
        best = module(torch.tensor([prompt.tokens]))[0, -1, :VOCAB].div(3.0).topk(5)
    assert set(counts.nonzero().flatten().tolist()) == set(best.indices.tolist())
    torch.testing.assert_close(counts[best.indices], best.values.softmax(0), atol=0.06, rtol=0)


def encode(source: GenerationSource, text: str) -> EncodedPrompt:
    return encode_prompt(Prompt("--prompt", text), source.tokenizer, max_positions=source.max_positions)


def test_the_repetition_penalty_ignores_padding(checkpoints: dict[str, Path], tool: GenerateTool) -> None:
    words = [*greedy(checkpoints["llama-zero3"]), "--repetition_penalty", 1.5]
    rows = tool.rows(*words)
    assert rows == tool.rows(*words, "--batch_size", 1)
    assert [row["tokens"] for row in rows] != [row["tokens"] for row in tool.rows(*words[:-2])]


def without_end_token(source: GenerationSource, *end_tokens: int) -> LoadedModel:
    """Load a model whose texts end only at `end_tokens`."""
    return LoadedModel(load_model(source, "fp32", torch.device("cpu")), source.tokenizer, frozenset(end_tokens),
                       tuple(range(VOCAB, MODEL_VOCAB)))


def test_a_text_ends_at_a_stop_text_an_end_token_or_the_last_position(
        checkpoints: dict[str, Path], tool: GenerateTool) -> None:
    source = generation_source(checkpoints["llama-zero3"])
    prompts = [encode(source, PROMPTS[0] * 3), encode(source, PROMPTS[0])]
    texts = list(generate(without_end_token(source), prompts, Sampling(99, temperature=0)))
    assert [(len(text.tokens), text.finish_reason) for text in texts] == [(64 - 60, "length"), (64 - 20, "length")]
    expected, full = texts[1].tokens, texts[1].text
    assert full == source.tokenizer.decode(expected)

    end = expected[9]
    text = next(generate(without_end_token(source, end), prompts[1:], Sampling(NEW, temperature=0)))
    count = expected.index(end)
    assert (text.finish_reason, text.tokens, text.text) == ("eos", expected[:count + 1], text_of(expected[:count]))

    words, stop = greedy(checkpoints["llama-zero3"]), text_of(expected[6:8])
    row = tool.rows(*words, "--stop", stop, "--stop=never")[0]
    count = text_of(expected).index(stop)
    assert (row["finish_reason"], row["completion"], row["tokens"]) == ("stop", text_of(expected[:count]),
                                                                       expected[:count + 2])
    tool.text(words[0], "--max_new_tokens", 99, "--prompt", PROMPTS[0] * 3)
    with pytest.raises(ConfigError, match=r"--prompt: the prompt has 80 tokens, and the model has 64 positions"):
        tool.text(words[0], "--prompt", PROMPTS[0] * 4)
    note = "note: --prompt: --max_new_tokens 99 is reduced to 4: the model has 64 positions"
    assert note in tool.capsys.readouterr().err


def test_prompts_from_files_and_standard_input(checkpoints: dict[str, Path], tmp_path: Path,
                                               tool: GenerateTool) -> None:
    words = [checkpoints["gpt2-zero3"], "--temperature", 0, "--max_new_tokens", 3]
    expected = tool.text(*words, *(f"--prompt={prompt}" for prompt in PROMPTS))
    assert [part[:len(prompt)] for part, prompt in zip(expected.split("--------\n"), PROMPTS, strict=True)] == PROMPTS
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\r\n".join(["\ufeff" + PROMPTS[0], "", *PROMPTS[1:]]).encode())
    assert tool.text(*words, "--prompt_file", lines) == expected
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_bytes(gzip.compress("\n".join(json.dumps({"q": prompt}) for prompt in PROMPTS).encode()))
    assert tool.text(*words, "--prompt_file", rows, "--jsonl_key", "q") == expected
    tool.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(PROMPTS).encode())))
    assert tool.text(*words, "--prompt_file", "-") == expected


def test_interactive_texts_are_printed_while_they_are_generated(
        checkpoints: dict[str, Path], tool: GenerateTool) -> None:
    words = [checkpoints["gpt2-zero3"], "--temperature", 0, "--max_new_tokens", 5]
    texts = [row["completion"] for row in tool.rows(*words, *(f"--prompt={prompt}" for prompt in PROMPTS))]
    pieces: list[str] = []

    def collect(piece: str) -> None:
        pieces.append(piece)
        print(piece, end="")
        if len(pieces) == 7:  # in the second text
            raise KeyboardInterrupt

    tool.monkeypatch.setattr(decode, "_print_piece", collect)
    tool.monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([PROMPTS[0], PROMPTS[1], PROMPTS[0] * 4, PROMPTS[2]])))
    assert tool.text(*words, "--interactive").splitlines() == [texts[0], texts[1][:2] + " [stopped]", texts[2]]
    assert "prompt: the prompt has 80 tokens" in tool.capsys.readouterr().err
    assert pieces[:5] == list(texts[0])


def test_a_piece_that_may_begin_a_stop_text_is_held_back(checkpoints: dict[str, Path]) -> None:
    source = generation_source(checkpoints["llama-zero3"])
    loaded = without_end_token(source)
    prompt, pieces = encode(source, PROMPTS[0]), list[str]()
    full = generate_batch(loaded, [Completion(prompt, 0)], Sampling(12, temperature=0))[0].text
    for stop, expected in ((full[5:8], full[:full.index(full[5:8])]), (full[5:7] + "z", full)):
        pieces.clear()
        generate_batch(loaded, [Completion(prompt, 0)], Sampling(12, temperature=0, stop=(stop,)),
                       on_text=pieces.append)
        assert "".join(pieces) == expected


def test_layers_on_two_devices(checkpoints: dict[str, Path], tmp_path: Path, tokenizer: Path,
                               tool: GenerateTool) -> None:
    """A checkpoint and a transformers folder. The second half of the layers is on disk until each layer is computed."""
    checkpoint = checkpoints["llama-pipeline"]
    expected = [row["tokens"] for row in tool.rows(*greedy(checkpoint))]
    source = generation_source(checkpoint)
    first = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu"}
    placement = {**first, "model.layers.1": "disk", "model.layers.2": "disk", "model.norm": "disk", "lm_head": "disk"}
    load_model(source, "fp32", torch.device("cpu")).save_pretrained(tmp_path / "hf")
    shutil.copy(tokenizer, tmp_path / "hf/tokenizer.json")
    for origin in (source, generation_source(tmp_path / "hf")):
        model = load_model(origin, "fp32", placement, offload_folder=tmp_path / "offloaded")
        assert model.hf_device_map == placement
        assert [weight.is_meta for weight in (model.model.embed_tokens.weight, model.lm_head.weight)] == [False, True]
        loaded = LoadedModel(model, source.tokenizer, frozenset({0}), tuple(range(VOCAB, MODEL_VOCAB)))
        prompts = [encode(source, prompt) for prompt in PROMPTS]
        assert [text.tokens for text in generate(loaded, prompts, Sampling(NEW, temperature=0))] == expected
    assert [row["tokens"] for row in tool.rows(tmp_path / "hf", *greedy(checkpoint)[1:])] == expected
