"""The flags of `pretrain/train.py`, in groups.

Settings of the DeepSpeed JSON (batch sizes, precision, ZeRO, optimizer, clipping) have no flags. The exceptions are in
`AutoArguments`: these flags fill keys that the JSON leaves out or sets to "auto".
"""

from pretrain.config.flags.model_flags import DataArguments, InitArguments, ModelArguments
from pretrain.config.flags.running_flags import (
    CheckpointArguments,
    InstrumentArguments,
    LoggingArguments,
    ResilienceArguments,
    SteeringArguments,
)
from pretrain.config.flags.training_flags import AutoArguments, RecipeArguments, ScheduleArguments, SpeedArguments

GROUPS = (ModelArguments, DataArguments, ScheduleArguments, RecipeArguments, InitArguments, LoggingArguments,
          InstrumentArguments, CheckpointArguments, SteeringArguments, ResilienceArguments, AutoArguments,
          SpeedArguments)
