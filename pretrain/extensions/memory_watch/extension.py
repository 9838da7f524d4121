"""The memory of a run, compared with its prediction: the declaration."""

from typing import TYPE_CHECKING

from pretrain.extension import Extension

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.plan import Plan


def _callbacks(plan: "Plan") -> "list[Callback]":
    from pretrain.distributed.world import running_environment
    from pretrain.extensions.memory_watch.watch import MemoryWatch

    return [MemoryWatch.before_build(plan, running_environment())]


EXTENSION = Extension(
    "memory_watch", "Compares the memory of a run with its prediction, and says what helps if it was not enough.",
    callbacks=_callbacks)
