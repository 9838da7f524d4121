"""List the classes and functions that a `torch.save` file needs, without torch and without reading tensors."""

import pickletools
import struct
import zipfile
from pathlib import Path

_STORAGES = ("BFloat16", "Bool", "Byte", "Double", "Float", "Half", "Int", "Long", "Short")
# classes and functions that checkpoints usually need; `pickles.load_pickle` accepts all of these and a few others
USUAL_GLOBALS = frozenset({
    "collections OrderedDict", "torch Size", "torch._utils _rebuild_tensor_v2",
    *(f"torch {name}Storage" for name in _STORAGES),
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler", "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.runtime.zero.config ZeroStageEnum", "deepspeed.utils.tensor_fragment fragment_address"})
_OTHER_IMPORTS = ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4")  # import opcodes that torch.save never writes


def has_only_usual_globals(path: Path) -> bool:
    """Return whether the file is in torch.save's zip format and needs only USUAL_GLOBALS."""
    try:
        return pickle_globals(path) <= USUAL_GLOBALS
    except (OSError, ValueError, struct.error, zipfile.BadZipFile):
        return False


def pickle_globals(path: Path) -> set[str]:
    """Return "MODULE NAME" of each class and function that the file's pickle imports.

    For import opcodes that torch.save does not write, the set has the opcode's name instead. Raises OSError,
    ValueError, struct.error or BadZipFile if the file is not in torch.save's zip format.
    """
    found = set()
    for opcode, argument, _ in pickletools.genops(_data_pkl(path)):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name in _OTHER_IMPORTS:
            found.add(opcode.name)
    return found


def _data_pkl(path: Path) -> bytes:
    """Read the archive's pickle, which is stored uncompressed.

    ZipFile.read cannot be used, because it checks a CRC-32 that `FileEngine` does not write.
    """
    with open(path, "rb") as file:
        with zipfile.ZipFile(file) as archive:
            (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
        file.seek(entry.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        file.seek(name_length + extra_length, 1)
        return file.read(entry.file_size)
