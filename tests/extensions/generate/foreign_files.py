"""Foreign files that the subcommand reads, and its commands: see tests/foreign_files/commands.py."""

from typing import Any

_CHECKPOINT, _WORDS = "checkpoints/global_step4", ["--prompt", "w1 w2", "--max_new_tokens", "2"]
_FILES_OF_HF = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json",
                "adapter_config.json", "chat_template.jinja")
READERS = {
    "run": {f"{_CHECKPOINT}/manifest.json": ("generate",), f"{_CHECKPOINT}/shard_index_rank_00000.json": ("generate",)},
    "hf": dict.fromkeys(_FILES_OF_HF, ("generate",))}
WITHOUT_DATA = {("generate", "RUN", "--prompt", "2", "--max_new_tokens", "2"): True}


def commands(world: Any) -> dict[str, dict[str, list[str]]]:
    """Return name of FILES -> name -> words."""
    return {name: {"generate": ["generate", str(folder), *_WORDS]} for name, folder in (
        ("run", world.run), ("hf", world.hf))}
