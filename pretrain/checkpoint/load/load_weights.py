"""Load weights alone into an engine of any layout, for a run that begins at step 0."""

from dataclasses import replace
from pathlib import Path
from socket import gethostname

from deepspeed import DeepSpeedEngine

from pretrain.checkpoint.format.verify import Advance
from pretrain.checkpoint.load.agree import find_damage_together, hash_together, reject_foreign_pickles
from pretrain.checkpoint.load.hf_folder import HFFolder, HFWeights
from pretrain.checkpoint.load.hf_hashes import expected_hashes, hash_files
from pretrain.checkpoint.load.init_from import InitialWeights
from pretrain.checkpoint.load.reader import CheckpointReader
from pretrain.checkpoint.load.reshard import fill_weights
from pretrain.distributed.collectives import gather
from pretrain.errors import ConfigError


def verify_weights(weights: InitialWeights) -> None:
    """Compare the files with their recorded hashes; each rank reads some of them. Collective.

    Raises ConfigError, on every rank, if a file is damaged, or if the hosts have different files.
    """
    where = f"--init_from {weights.origin.name}"
    hosts = gather((weights.origin.fingerprint, gethostname()))
    for fingerprint, host in hosts:
        if fingerprint != hosts[0][0]:
            raise ConfigError(where, problem=f"the weights on {host} differ from those on {hosts[0][1]}",
                              remedy="name a folder that all hosts share")
    if isinstance(weights.source, HFFolder):
        damage = _find_damage_in_folder(weights.source)
    else:
        damage = find_damage_together(*weights.source)
    if damage:
        raise ConfigError(where, problem=f"a file is damaged ({damage[0].rstrip('.')})",
                          remedy="name another checkpoint or folder, or write the file again")
    if not isinstance(weights.source, HFFolder):
        reject_foreign_pickles(*weights.source)


def _find_damage_in_folder(found: HFFolder) -> list[str]:
    """Hash those files of a transformers folder whose hashes are recorded. Collective."""
    def damage(names: list[str], advance: Advance) -> list[str]:
        try:
            hash_files(replace(found, files=tuple(names)), advance)
        except ConfigError as error:
            return [str(error)]
        return []

    sizes = {name: found.bytes_of(name) for name in expected_hashes(found.folder, found.files)}
    return hash_together(sizes, damage)


def load_weights(engine: DeepSpeedEngine, weights: InitialWeights) -> None:
    """Fill the weights. Optimizer, schedule, counters and random numbers remain those of a new run. Collective."""
    source = weights.source
    if isinstance(source, HFFolder):
        fill_weights(engine, lambda: HFWeights(source))
    else:
        load_checkpoint_weights(engine, source[0])


def load_checkpoint_weights(engine: DeepSpeedEngine, folder: Path) -> None:
    """Fill the weights from a checkpoint, and load nothing else of it. Collective."""
    fill_weights(engine, lambda: CheckpointReader(folder))
