"""Token files and text inputs at URLs: the flags of the cache, checks of URLs, and the event of a wait."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.cli import is_url, path_text
from pretrain.config.flags.flag import Group
from pretrain.errors import ConfigError, shorten
from pretrain.extension import Extension, Problem

if TYPE_CHECKING:
    from pretrain.callback import Callback
    from pretrain.config.flags.arguments import RunArguments
    from pretrain.config.plan import Plan

GROUP = Group("data in object stores")


@dataclass(frozen=True)
class ObjectStores:
    """Folder and size of the cache for pages of token files."""

    data_cache: str | None = GROUP.flag(
        None, "folder on a local disk for copies of data in an object store (--train_data s3://BUCKET/PREFIX), which "
        "all ranks of a host and later runs share", parse=path_text, metavar="FOLDER",
        unset="~/.cache/ds-pretrain/data", of_host=True, not_repeated="files are written there")
    data_cache_gb: float | None = GROUP.flag(
        None, "largest size of these copies, in GB; what does not fit is requested from the store again", low=0.1,
        high=1e6, unset="half of the free space of the disk", of_host=True, not_repeated="files are written there")


def _check(args: "RunArguments") -> None:
    """Raise ConfigError for URLs whose package is not installed, and for flags of a cache without effect."""
    from pretrain.active_extensions import reader_of
    from pretrain.remote import without_credentials

    flags, spec = args.of(ObjectStores), args.data
    urls = [prefix for prefix in spec.prefixes if is_url(prefix)
            and reader_of("token_files", prefix, "")[0].name == EXTENSION.name]
    if urls:
        from pretrain.extensions.object_stores.remote_file import open_file_system

        for url in urls:
            open_file_system(url, f"{_flag_of(url, args)} {shorten(without_credentials(url))}")
    if flags.data_cache and is_url(flags.data_cache):
        raise ConfigError("--data_cache", found=shorten(without_credentials(flags.data_cache)),
                          expected="a folder on a local disk")
    given = {"data_cache": flags.data_cache, "data_cache_gb": flags.data_cache_gb}
    for name, value in given.items():
        if value is not None and spec.module is not None:
            raise ConfigError(f"--dataset_module / --{name}", found="both", expected="one of the two",
                              remedy="the function of --dataset_module returns all data of the run")
        if value is not None and spec.prefixes and not urls:
            raise ConfigError(f"--{name} {shorten(str(value))}", problem="it has no effect: no data of the run is in "
                              "an object store", remedy="leave it out")


def _flag_of(url: str, args: "RunArguments") -> str:
    return next((f"--{name}" for name in ("train_data", "valid_data", "test_data")
                 if url in str(args.value(name))), "--train_data")


def _callbacks(plan: "Plan") -> "Iterator[Callback]":
    if any(map(is_url, plan.data.prefixes)):
        from pretrain.extensions.object_stores.token_file import StoreWaits
        yield StoreWaits()


EXTENSION = Extension(
    "object_stores", "Reads token files and text in object stores and on web servers.", settings=ObjectStores,
    is_always_used=True, check=_check, callbacks=_callbacks, token_files={"*": "data_set:StoredTokens"},
    text_inputs={"*": "text_files:files_at"},
    events={"store_wait": ("seconds name",
                           "the object store with this file of the data answers again after this time")},
    problems={"store_wait": Problem("the run waited for the object store of the data: {reason}",
                                    "look at the network and the store")})
