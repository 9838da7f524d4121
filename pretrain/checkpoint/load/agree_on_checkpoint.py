"""Agree on the checkpoint to resume from: rank 0 proposes one, and each rank verifies some of its files.

In the same way the ranks agree on the training data, and verify the weights of --init_from.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname

import torch.distributed as dist

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.format.pickles import load_pickle
from pretrain.checkpoint.format.run_checkpoints import (
    checkpoint_folders,
    head_of,
    latest_name,
    latest_problem,
    manifest_or_error,
    no_good_checkpoint,
    not_finite_lines,
    read_head,
    read_manifest,
    step_of,
    wait_for_writers,
)
from pretrain.checkpoint.format.verify import Advance, files_of_rank, find_damage, unexpected_files
from pretrain.checkpoint.load.hf_folder import HFFolder, expected_hashes, hash_files
from pretrain.checkpoint.load.init_from import InitialWeights, find_branch
from pretrain.checkpoint.load.resume import Resume, checkpoints_folder, make_resume, reject_overwrite
from pretrain.checkpoint.save.commit import remove_leftovers, save_errors, write_latest
from pretrain.checkpoint.save.mirror import check_mirror, fetch, mirrored_checkpoints
from pretrain.checkpoint.save.retention import abandoned_save_ids, move_abandoned
from pretrain.config.plan import Plan
from pretrain.data.samples.dataset import source_records
from pretrain.distributed.collectives import from_rank_0, gather, gather_problems, rejected_together, wait_until_all
from pretrain.errors import ConfigError, SaveError
from pretrain.progress import ProgressBar
from pretrain.remote import without_credentials

Candidate = tuple[Path, str] | str  # (folder, text of its manifest.json), or why it cannot be used


def agree_on_checkpoint(plan: Plan, log: Callable[[str], None]) -> Resume | None:
    """Return the newest good checkpoint whose files have the hashes of its manifest; None: begin at step 0. Collective.

    Without a checkpoint in run folder and mirror, this is the one of --resume_from, if the flag is given.

    Raises ConfigError, on every rank, if no checkpoint can be used although there are some or the mirror has a problem,
    if this run cannot resume from the newest undamaged one, if --resume required finds none, or if --resume never finds
    one.
    """
    candidates = _candidates(plan, log)  # only rank 0 advances this iterator
    errors: list[str] = []
    folder_of_branch = False
    while (candidate := from_rank_0(lambda: _next(candidates))) is not None:
        if isinstance(candidate, str):
            errors.append(candidate)
            continue
        folder, manifest = candidate[0], Manifest.from_json(candidate[1])
        folder_of_branch = folder.parent != checkpoints_folder(plan)
        damage = find_damage_together(folder, manifest)
        if not damage:
            reject_foreign_pickles(folder, manifest)
            resume = _make_resume(folder, manifest, errors, plan)
            if resume.branch is not None:  # the folder of the other run is only read
                return resume
            return replace(resume, warnings=[*resume.warnings, *from_rank_0(partial(_repair_latest, resume))])
        errors += damage
    if errors and folder_of_branch:
        raise ConfigError(f"--resume_from {plan.args.resume_from}", problem=errors[0], remedy="use another checkpoint")
    if errors:
        raise no_good_checkpoint(checkpoints_folder(plan), errors)
    if plan.args.resume == "required":
        mirror = " or in the mirror" if plan.args.checkpoint_mirror else ""
        raise ConfigError("--resume required", problem=f"there is no checkpoint in {checkpoints_folder(plan)}{mirror}",
                          remedy="to begin at step 0, use --resume auto")
    return None


def _make_resume(folder: Path, manifest: Manifest, warnings: list[str], plan: Plan) -> Resume:
    """Return the result of `make_resume`; only rank 0 reads run.json. Raises a ConfigError on every rank. Collective.
    """
    with rejected_together():
        resume = make_resume(folder, manifest, warnings, plan, with_record=dist.get_rank() == 0)
    return resume


def agree_on_data(plan: Plan) -> None:
    """Raise ConfigError on every rank if hosts have different training data under the same name. Collective."""
    dataset = plan.datasets["train"]
    hashes = [record["sha256"] for _, record in source_records(dataset)]
    all_ranks = gather((dataset.fingerprint, hashes, gethostname()))
    fingerprint, _, host = all_ranks[0]
    for other_fingerprint, _, other_host in all_ranks:
        if other_fingerprint != fingerprint:
            raise _other_data(plan.data.train_flag, other_host, host)
    for number, source in enumerate(dataset.sources):
        known = [(of_rank[number], name) for _, of_rank, name in all_ranks if of_rank[number]]
        for sha256, other_host in known:
            if sha256 != known[0][0]:
                where = f"--train_data {source.prefix}" if len(hashes) > 1 else plan.data.train_flag
                raise _other_data(where, other_host, known[0][1])


def _other_data(where: str, host: str, first: str) -> ConfigError:
    return ConfigError(where, problem=f"{host} has other data under this name than {first}",
                       remedy="copy the same files to all hosts")


def _next(candidates: Iterator[Candidate]) -> Candidate | None:
    with save_errors("the run folder"):
        return next(candidates, None)


def _candidates(plan: Plan, log: Callable[[str], None]) -> Iterator[Candidate]:
    """Yield the checkpoints of the run folder and the mirror, newest first. Call it on rank 0 only.

    First waits for background writers, removes leftovers of a killed run, and raises ConfigError if --resume never
    would overwrite a checkpoint. Problems are yielded as error messages: of the mirror, of a manifest, of a file's
    size, NaN or infinite values. For each step the local checkpoint comes first. The checkpoint of the mirror is
    fetched only if there is no local one, or if the caller asks for the next candidate.
    """
    checkpoints, mirror = checkpoints_folder(plan), plan.args.checkpoint_mirror
    wait_for_writers(checkpoints, timeout_s=plan.args.save_timeout, log=log)
    remove_leftovers(checkpoints)
    move_abandoned(checkpoints)  # if the run was killed during a rollback
    local = {step_of(folder): folder for folder in checkpoint_folders(checkpoints)}
    mirrored: dict[int, str] = {}
    mirror_is_read = True
    try:
        if mirror is not None:
            check_mirror(mirror)
            abandoned = abandoned_save_ids(checkpoints)
            mirrored = {step_of(Path(tag)): tag for tag in mirrored_checkpoints(mirror, abandoned)}
    except ConfigError as error:
        mirror_is_read = False
        yield str(error)  # the run can still resume from a local checkpoint
    if plan.args.resume == "never":
        reject_overwrite([*local.values(), *(f"{without_credentials(str(mirror))}/{tag}" for tag in mirrored.values())])
    not_finite: list[Path] = []  # checkpoints of steps above this one, not reported yet: one line reports all of them
    for step in sorted(local.keys() | mirrored.keys(), reverse=True):
        found = manifest_or_error(local[step]) if step in local else None
        if isinstance(found, ConfigError):
            yield str(found)
        elif found is not None and not found.is_good:
            not_finite.append(local[step])
        good = found if isinstance(found, Manifest) and found.is_good else None
        if good is not None or step in mirrored:
            yield from not_finite_lines(not_finite)
            not_finite = []
        if good is not None:
            yield local[step], good.to_json()
        if step in mirrored:
            log(f"fetching {mirrored[step]} from {without_credentials(str(mirror))}")
            yield _fetch_candidate(str(mirror), checkpoints, mirrored[step])
    yield from not_finite_lines(not_finite)
    # an unreadable mirror may hold later checkpoints of the branch: branching again would overwrite them
    if plan.args.resume_from is not None and not local and not mirrored and mirror_is_read:
        folder, manifest, notes = find_branch(plan.args)
        for note in notes:
            log(note)
        yield folder, manifest.to_json()


def _fetch_candidate(mirror: str, checkpoints: Path, tag: str) -> Candidate:
    """Copy a checkpoint from the mirror."""
    try:
        folder = fetch(mirror, checkpoints, tag)
        return folder, read_manifest(folder).to_json()
    except (ConfigError, SaveError) as error:
        return str(error)


def _repair_latest(chosen: Resume) -> list[str]:
    """Write the name of the chosen checkpoint into `latest` if it has another one. Return a line about it. Rank 0 only.

    Imported weights need no such file, because plain DeepSpeed cannot load them. If `latest` names a newer checkpoint,
    the warnings say already why that one is not used.
    """
    folder = chosen.folder
    problem = latest_problem(folder.parent, folder)
    if problem is None or chosen.manifest.weights_only:
        return []
    names_newer = step_of(folder.parent / latest_name(folder.parent)) > step_of(folder)
    try:
        write_latest(folder)
    except OSError as error:
        return [f"{problem}; it cannot be replaced ({error.strerror})"]
    return [] if names_newer else [f"{problem}; it now names {folder.name}"]


def find_damage_together(folder: Path, manifest: Manifest) -> list[str]:
    """Compare a checkpoint's files with the hashes of its manifest. Return the problems of all ranks. Collective."""
    problems = _manifest_problems(folder, manifest)
    if dist.get_rank() == 0:
        problems += unexpected_files(folder, manifest)
    damage = hash_together(manifest.sizes, lambda names, advance: find_damage(folder, manifest, names, advance=advance))
    return damage + gather_problems(problems)


def hash_together(sizes: dict[str, int], find: Callable[[list[str], Advance], list[str]]) -> list[str]:
    """Divide the files among the ranks, and return the problems that `find` returns on all ranks. Collective.

    Args:
        sizes: bytes of each file.
        find: called in a thread with this rank's files, and with a function to report progress.
    """
    mine = files_of_rank(sizes, dist.get_rank(), dist.get_world_size())
    with ThreadPoolExecutor(1) as pool, ProgressBar("verifying", sum(sizes[name] for name in mine),
                                                    active=dist.get_rank() == 0) as progress:
        hashing = pool.submit(find, mine, progress.advance)
        wait_until_all(hashing.done)
        return gather_problems(hashing.result())


def _manifest_problems(folder: Path, manifest: Manifest) -> list[str]:
    """Return one line if this host reads another manifest than rank 0. Then the hosts do not share the folder.

    The list of files is not read: the save_id before it belongs to one save, and rank 0 has compared the hash.
    """
    try:
        text = manifest.to_json()
        if read_head(folder / MANIFEST) == (head_of(text), len(text)):
            return []
        problem = "has another manifest than rank 0"
    except (OSError, ValueError) as error:
        problem = f"cannot read the manifest ({error})"
    return [f"{folder}: {gethostname()} {problem}; all hosts must share this folder"]


def reject_foreign_pickles(folder: Path, manifest: Manifest) -> None:
    """Raise ConfigError, on every rank, if a pickle needs a class outside the allow-list of `pickles.py`."""
    sizes = {name: size for name, size in manifest.sizes.items() if name.endswith(".pt")}
    with rejected_together():
        for name in files_of_rank(sizes, dist.get_rank(), dist.get_world_size()):
            load_pickle(folder / name, mmap=True)


def verify_weights(weights: InitialWeights) -> None:
    """Compare the files with their recorded hashes; each rank reads some of them. Collective.

    Raises ConfigError, on every rank, if a file is damaged, or if the hosts have different files.
    """
    where, source = f"--init_from {weights.origin.name}", weights.source
    # ranks other than rank 0 have not read the list of files, which is part of a checkpoint's fingerprint
    hosts = gather((weights.origin.fingerprint if isinstance(source, HFFolder) else source[1].save_id, gethostname()))
    for fingerprint, host in hosts:
        if fingerprint != hosts[0][0]:
            raise ConfigError(where, problem=f"the weights on {host} differ from those on {hosts[0][1]}",
                              remedy="name a folder that all hosts share")
    if isinstance(source, HFFolder):
        damage = _find_damage_in_folder(source)
    else:
        manifest = manifest_of_rank_0(source[1])
        damage = find_damage_together(source[0], manifest)
    if damage:
        raise ConfigError(where, problem=f"a file is damaged ({damage[0].rstrip('.')})",
                          remedy="name another checkpoint or folder, or write the file again")
    if not isinstance(source, HFFolder):
        reject_foreign_pickles(source[0], manifest)


def manifest_of_rank_0(manifest: Manifest) -> Manifest:
    """Return rank 0's manifest, whose list of files it alone reads from the file system; collective."""
    return Manifest.from_json(from_rank_0(manifest.to_json))


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
