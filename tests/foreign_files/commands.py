"""The foreign files of the sandbox, and the commands that read them."""

from dataclasses import dataclass
from pathlib import Path

from pretrain.checkpoint.format.manifest import MANIFEST
from tests.support.extensions import entries_of_extensions, modules_of_extensions

_OF_EXTENSIONS = list(modules_of_extensions("foreign_files"))
STEP = 4  # of the newest checkpoint
_CHECKPOINT = f"checkpoints/global_step{STEP}"


@dataclass(frozen=True)
class World:
    """Folders of the sandbox. Commands may write to `out`, `tmp` and `cache` only."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        """Return a folder: run, own (the same run, unchanged), hf, data, victim, here, out, tmp, cache."""
        return self.folder / name

    def base(self, name: str) -> Path:
        """Return the folder of the files that FILES has under a name.

        It is the data, for those that an extension adds and does not write.
        """
        is_in_data = name not in _FILES and any(
            name in getattr(module, "FILES", ()) and not hasattr(module, "write_files") for module in _OF_EXTENSIONS)
        return self.data if is_in_data else self.folder / name

    def write_in_run(self) -> None:
        """Write files of extensions into the run, which has been trained with RUN_FLAGS."""
        for module in _OF_EXTENSIONS:
            if hasattr(module, "write_in_run"):
                module.write_in_run(self.run)

    def write_files_of_extensions(self) -> None:
        """Make what takes long, once."""
        for module in _OF_EXTENSIONS:
            if hasattr(module, "write_files") and not all(self.base(name).exists() for name in module.FILES):
                module.write_files(self.folder)

    def flags(self, **changes: str) -> list[str]:
        """Return flags of a run of the user."""
        flags = {"deepspeed_config": f"{self.data}/own.json", "model": "tiny", "train_data": f"{self.data}/few",
                 "model_overrides": "vocab_size=320,n_layer=1,n_embd=32", "seq_length": "32", "train_steps": "50",
                 "save": f"{self.out}/new", **changes}
        return [word for name, value in flags.items() if value for word in (f"--{name}", value)]


Words = list[str]


def commands(world: World) -> dict[str, dict[str, Words]]:
    """Return, for each foreign folder or file, name -> words of the commands that read it."""
    run, out, hf = map(str, (world.run, world.out, world.hf))
    branch = {"model": "", "model_overrides": ""}
    found = {
        "run": {
            "summary": ["summary", run],
            "list": ["checkpoint", "list", run], "verify": ["checkpoint", "verify", run],
            "diff": ["checkpoint", "diff", run, str(world.own)],
            "calibrate": ["compare", "--calibrate", run, "--model", "tiny", "--world_size", "2"],
            "resume_from": ["check", *world.flags(resume_from=run)],
            "init_from": ["check", *world.flags(init_from=run, **branch)],
            "evaluate": ["evaluate", run, "--json", f"{out}/scores.json", "--max_samples", "2"],
            "export": ["export", run, "--output", f"{out}/exported"],
            "consolidate": ["checkpoint", "consolidate", run, f"{out}/consolidated"]},
        "hf": {
            "import": ["import", hf, "--output", f"{out}/imported"],
            "check": ["check", *world.flags(model=hf, model_overrides="", seq_length="16")],
            "init_from": ["check", *world.flags(init_from=hf, seq_length="16", **branch)],
            "compare": ["compare", "--model", hf, "--world_size", "2"],
            "prepare": ["prepare", f"{world.data}/text.txt", "--tokenizer", hf, "--out", f"{out}/tokens"]},
        "data": {"info": ["data", "info", f"{world.data}/corpus"], "verify": ["data", "verify", f"{world.data}/corpus"],
                 "check": ["check", *world.flags(train_data=f"{world.data}/corpus", model_overrides="")]}}
    for module in _OF_EXTENSIONS:
        for name, words in module.commands(world).items() if hasattr(module, "commands") else ():
            found.setdefault(name, {}).update(words)
    return found


# files of each folder, and the commands that read them; () are all
_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "run": {
        "run.json": (),
        "metrics.jsonl": ("summary", "calibrate"),
        "events.jsonl": ("summary",),
        "rollbacks.jsonl": ("list", "resume_from"),
        "restarts.jsonl": ("summary",),
        f"{_CHECKPOINT}/{MANIFEST}": (
            "list", "verify", "diff", "resume_from", "init_from", "evaluate", "export", "consolidate"),
        f"{_CHECKPOINT}/shard_index_rank_00000.json": ("verify", "export"),
        "checkpoints/latest": ("list", "resume_from", "init_from", "export")},
    "hf": {"config.json": (), "tokenizer.json": ("import", "prepare"),
           "tokenizer_config.json": ("import", "prepare"),
           "special_tokens_map.json": ("import", "prepare"),
           "generation_config.json": ("import",),
           "model.safetensors.index.json": ("import", "init_from"),
           "added_tokens.json": ("import",),
           "adapter_config.json": ("import",),
           "chat_template.jinja": ("import",)},
    "data": {"corpus.meta.json": (), "corpus.sha256.json": ("verify", "info", "check")}}


def _all_files() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the files with those of extensions, and the commands of extensions that read files of others."""
    found = {name: dict(files) for name, files in _FILES.items()}
    for module in _OF_EXTENSIONS:
        for name, files in getattr(module, "FILES", {}).items():
            found.setdefault(name, {}).update(files)
    for module in _OF_EXTENSIONS:
        for name, readers in getattr(module, "READERS", {}).items():
            for file, names in readers.items():
                if file in found[name]:
                    found[name][file] = (*found[name][file], *names)
    return found


FILES = _all_files()
RUN_FLAGS = entries_of_extensions("foreign_files", "RUN_FLAGS")  # flags of the run
# values of run.json that name files, hosts, repositories, modules or commands
PLACES = (*(f"0.flags.{name}" for name in (
    "tokenizer", "train_data", "valid_data", "test_data", "init_from", "model", "model_code", "dataset_module",
    "dataset_args", "nvme_path", "checkpoint_mirror", "save", "resume_from", "trackio",
    "deepspeed_config", "note", *(name for module in _OF_EXTENSIONS for name in getattr(module, "PLACES", ())))),
    "0.resumed_from", "0.command.directory", "0.hardware.0.host", "0.code.diff", "0.environment.LD_PRELOAD",
    "0.environment.TORCH_EXTENSIONS_DIR", "0.model_config.auto_map", "0.model_config._attn_implementation",
    "0.model_config._name_or_path", "0.model_config.model_type", "0.tokenizer", "0.given_deepspeed_config.wandb",
    "0.data.train", "0.git_commit")
NUM_NAMES = 34  # the last payloads name places
# .pt files whose values are made hostile, too
PICKLES: dict[str, tuple[str, ...]] = entries_of_extensions("foreign_files", "PICKLES")
