"""Find a model or tokenizer of the Hugging Face Hub in the local cache, and download it if its repository is named.

Folders of the cache are `models--ORG--NAME`, with `refs/main` (a revision) and `snapshots/REVISION/` (links to files).
"""

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pretrain.cli import say
from pretrain.errors import ConfigError, shorten
from pretrain.stored_json import read_json

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FILE = re.compile(r".*\.(json|ya?ml|safetensors|bin|model|txt)")
_TOKENIZER = ("tokenizer*", "*.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
_PATTERNS = {
    "config": ("config.json",), "tokenizer": _TOKENIZER,
    "weights": ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
                *_TOKENIZER),
}
"""the files of a repository that are downloaded, by what is wanted"""
_WANTED = {"config": "config.json", "tokenizer": "the tokenizer", "weights": "the weights"}
CONNECT_TO = "DS_PRETRAIN_CONNECT_TO"  # places that files may name: see `allowed_by_user`
_TIMEOUT_S = 10.0
_TOKENIZERS = {
    "openai-community/gpt2": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-125m", "gpt3-350m", "gpt3-760m",
                              "gpt3-1.3b", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"),
    "EleutherAI/pythia-70m": ("pythia-14m", "pythia-31m", "pythia-70m", "pythia-160m", "pythia-410m", "pythia-1b",
                              "pythia-1.4b", "pythia-2.8b", "pythia-6.9b", "pythia-12b"),
    "allenai/OLMo-2-0425-1B": ("olmo2-1b", "olmo2-7b"), "allenai/OLMoE-1B-7B-0924": ("olmoe-1b-7b",),
    "Qwen/Qwen2.5-0.5B": ("qwen2.5-0.5b", "qwen2.5-7b"), "Qwen/Qwen3-0.6B": ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"),
    "meta-llama/Llama-2-7b-hf": ("llama2-7b",), "meta-llama/Llama-3.2-1B": ("llama3-1b", "llama3-3b"),
    "meta-llama/Meta-Llama-3-8B": ("llama3-8b", "llama3-70b"), "mistralai/Mistral-7B-v0.1": ("mistral-7b",),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral-8x7b",), "google/gemma-2-2b": ("gemma2-2b",),
}
"""repository -> the presets of --model whose published tokenizer it has"""


def is_repository(name: str) -> bool:
    """Return whether `name` is org/name of a repository, and not a path.

    If there is a local folder `org`, the name is taken for a misspelt path.
    """
    return bool(_REPOSITORY.fullmatch(name)) and not _FILE.fullmatch(name) and \
        not os.path.exists(name) and not os.path.isdir(name.partition("/")[0])


def tokenizer_repository(value: str) -> str | None:
    """Return the repository that a value of --tokenizer names: org/name, or a preset of --model. None for paths."""
    if os.path.exists(value):
        return None
    named = next((repository for repository, presets in _TOKENIZERS.items() if value in presets), None)
    return named or (value if is_repository(value) else None)


def recorded_tokenizer(value: str) -> str:
    """Return a value of --tokenizer that a file names. Raises ConfigError if it would have to be downloaded."""
    repository = tokenizer_repository(value)
    if repository is None or allowed_by_user(repository):
        return value
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    if _is_complete(snapshot_in(folder), "tokenizer"):
        return value
    raise ConfigError(f"--tokenizer {shorten(value)}", problem="a file names this repository, which is not in the "
                      "cache; nothing is downloaded because a file names it",
                      remedy=f"`hf download {repository}` fills the cache, if you trust it")


def allowed_by_user(place: str) -> bool:
    """Return whether the user has allowed to connect to a place that a file names: a URL or a repository.

    The variable CONNECT_TO has places, or their beginnings up to a slash, separated by spaces.
    """
    allowed = os.environ.get(CONNECT_TO, "").split()
    return any(f"{place}/".startswith(f"{each.rstrip('/')}/") for each in allowed)


def snapshot_in(folder: Path) -> Path:
    """Return the snapshot of `refs/main` for a cache folder models--ORG--NAME, and any other folder unchanged."""
    snapshots = folder / "snapshots"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return folder
    with contextlib.suppress(OSError):
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        if revision and (snapshots / revision).is_dir():
            return snapshots / revision
    found = sorted(snapshots.iterdir())
    return found[0] if len(found) == 1 else folder


def find_repository(name: str, *, flag: str, want: str) -> Path:
    """Return the folder in the cache with the files of repository `name`. Downloads missing files.

    The ranks of a host take turns, so that only the first one downloads.

    Args:
        want: "config"; "tokenizer"; or "weights" for all files of a model, its config.json and tokenizer too.

    Raises:
        ConfigError: the files are not in the cache, and cannot be downloaded.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    folder = cache / f"models--{name.replace('/', '--')}"
    if _is_complete(snapshot_in(folder), want):
        return snapshot_in(folder)
    if constants.HF_HUB_OFFLINE:
        raise _not_found(name, flag, f"this repository is not in the cache {cache}, and HF_HUB_OFFLINE is set")
    with _turn(cache, folder.name, name, flag):
        found = snapshot_in(folder)
        return found if _is_complete(found, want) else _download(name, flag, cache, want)


def _is_complete(snapshot: Path, want: str) -> bool:
    """Return whether a snapshot has the config.json, a tokenizer, or the config.json and all files with weights."""
    if want == "tokenizer":
        return any((snapshot / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "merges.txt"))
    if not (snapshot / "config.json").is_file() or want == "config":
        return (snapshot / "config.json").is_file()
    if (snapshot / "model.safetensors").is_file():
        return True
    try:
        index = read_json(snapshot / "model.safetensors.index.json")
        return all((snapshot / file).is_file() for file in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextlib.contextmanager
def _turn(cache: Path, key: str, name: str, flag: str) -> Iterator[None]:
    """Wait until no other process of this host downloads the same repository."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = open(cache / f".{key}.ds-pretrain.lock", "a")  # noqa: SIM115 (closed below)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            file.close()
            raise
    except OSError as error:
        raise _not_found(name, flag, f"the cache {cache} cannot be written ({error.strerror or error})") from None
    with file:
        yield


def _download(name: str, flag: str, cache: Path, want: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    say(f"downloading {_WANTED[want]} of {name} to {cache}")
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)  # snapshot_download alone waits forever for a silent server
        folder = Path(snapshot_download(name, allow_patterns=list(_PATTERNS[want])))
    except Exception as error:  # of the library, of its HTTP client, and of the file system
        raise _download_error(name, flag, error) from None
    if want != "tokenizer" and not (folder / "config.json").is_file():
        raise ConfigError(f"{flag} {name}", problem="this repository has no config.json",
                          remedy="name the repository of a transformers model")
    return folder


def _download_error(name: str, flag: str, error: BaseException) -> ConfigError:
    """Return the error for a failed download."""
    cause = error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return ConfigError(f"{flag} {name}", problem="there is no such folder, and no such repository on the Hub that "
                           "you may read", remedy="check the name; for a private repository, run `hf auth login`")
    text = " ".join(str(cause).split())
    return _not_found(name, flag, f"this repository cannot be downloaded "
                      f"({shorten(f'{type(cause).__name__}: {text}', 200)})")


def _not_found(name: str, flag: str, problem: str) -> ConfigError:
    return ConfigError(f"{flag} {name}", problem=f"there is no such folder, and {problem}",
                       remedy=f"`hf download {name}` on a machine with a network fills the cache")
