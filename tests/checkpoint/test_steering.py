"""Changes at a resume, validated before the ranks start: the kept schedule, --override, --resume_from."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.format.manifest import MANIFEST, Manifest
from pretrain.checkpoint.load.agree_on_checkpoint import _candidates
from pretrain.checkpoint.load.resume import Resume
from pretrain.checkpoint.load.start import check_start
from pretrain.config.flags.arguments import OVERRIDES
from pretrain.config.flags.parse import parse_arguments
from pretrain.config.plan import Plan
from pretrain.distributed.device import cpu_device
from pretrain.errors import ConfigError
from tests.checkpoint.starts import resumed, start_run, write_checkpoint
from tests.support.launch import ROOT

LONGER = "--train_steps=80"


@pytest.fixture
def flags(corpus: str) -> list[str]:
    return ["--train_data", corpus, "--split", "80,20,0", "--seq_length", "64", "--micro_batch_size", "4",
            "--gradient_accumulation_steps", "2", "--learning_rate", "1e-2"]


def _saved(run: Path, flags: list[str], **changes: Any) -> tuple[Plan, Manifest]:
    """Write a checkpoint of step 10, at sample 80."""
    plan = start_run(run, *flags).plan
    return plan, write_checkpoint(plan, **changes)


def _resumed(run: Path, *flags: str) -> Resume:
    return resumed(start_run(run, *flags))


def _override_notes(resume: Resume) -> list[str]:
    return [note for note in resume.plan.notes if "--override" in note]


def test_a_longer_run_keeps_the_first_schedule(tmp_path: Path, flags: list[str]) -> None:
    plan, _ = _saved(tmp_path, flags)
    resume = _resumed(tmp_path, *flags, LONGER)
    assert plan.schedule is not None
    assert plan.schedule.decay_steps == 50
    assert (resume.plan.schedule, resume.plan.train_steps) == (plan.schedule, 80)
    note, = _override_notes(resume)
    assert "remains that of the run's first start: cosine, warm-up to 0.01 at step 1, lowest rate 0.001 from step 50" \
        in note
    assert "the steps after 50 train at the lowest rate. --override schedule plans it again, for 80 steps" in note
    assert resume.plan.overrides == ()
    assert resume.plan.schedule(79) == pytest.approx(1e-3)


def test_the_kept_schedule_survives_further_resumes(tmp_path: Path, flags: list[str]) -> None:
    plan, _ = _saved(tmp_path, [*flags, "--lr_wsd_steps=10", "--lr_schedule=wsd"])
    again = [*flags, "--lr_schedule=wsd", LONGER]  # without --lr_wsd_steps, which does not ask for another value
    resumed = _resumed(tmp_path, *again).plan
    write_checkpoint(resumed)
    resumed = _resumed(tmp_path, *again).plan
    assert resumed.schedule == plan.schedule
    assert resumed.schedule_flags == {"lr_schedule": "wsd", "lr_wsd_steps": 10}


@pytest.mark.parametrize(("flag", "asks"), [
    ("--lr_decay_steps=80", "80 asks for another learning-rate schedule"), ("--lr_schedule=linear", "linear asks"),
    ("--lr_warmup_steps=5", "5 asks"), ("--min_lr_ratio=0.2", "0.2 asks"),
    ("--lr_decay_steps=50", ""), ("--min_lr=1e-3", ""), ("--lr_warmup_steps=1", "")])
def test_flags_that_ask_for_another_schedule_are_rejected(tmp_path: Path, flags: list[str], flag: str,
                                                          asks: str) -> None:
    plan, _ = _saved(tmp_path / "run", flags)
    if not asks:  # the flag names what the first start planned
        assert _resumed(tmp_path / "run", *flags, LONGER, flag).plan.schedule == plan.schedule
        return
    with pytest.raises(ConfigError, match=rf"{flag.split('=')[0]}: .*{asks}.* by --override schedule\.") as error:
        _resumed(tmp_path / "run", *flags, LONGER, flag)
    assert "\n" not in str(error.value)
    planned = _resumed(tmp_path / "run", *flags, LONGER, flag, "--override=schedule").plan
    assert planned.schedule == start_run(tmp_path / "new", *flags, LONGER, flag).plan.schedule
    assert [each["name"] for each in planned.overrides] == ["schedule"]


def test_a_checkpoint_without_a_schedule_continues_as_the_flags_say(tmp_path: Path, flags: list[str]) -> None:
    _saved(tmp_path, flags, schedule=None, schedule_flags={}, recipe={})
    resume = _resumed(tmp_path, *flags, LONGER, "--gradient_clipping=0.5")
    assert resume.plan.schedule is not None
    assert resume.plan.schedule.decay_steps == 80
    assert any("global_step10 does not record its learning-rate schedule" in note for note in resume.plan.notes)


def test_another_peak_keeps_the_shape(tmp_path: Path, flags: list[str]) -> None:
    plan, _ = _saved(tmp_path, [*flags, "--min_lr=1e-3"])
    changed = [*flags[:-1], "2e-2", "--min_lr=1e-3", LONGER, "--override=lr"]
    schedule = _resumed(tmp_path, *changed).plan.schedule
    assert plan.schedule is not None
    assert schedule == replace(plan.schedule, peak=2e-2, min_ratio=0.05)


def test_the_schedule_of_the_json_is_kept(tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
                              "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}

    def resumed(params: dict[str, Any], *more: str) -> Resume | None:
        file = Path("scheduled.json")
        file.write_text(json.dumps({**values, "scheduler": {"type": "WarmupDecayLR", "params": params}}))
        return start_run(Path("run"), *flags, "--deepspeed_config", str(file), *more).resume

    auto = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto"}
    assert resumed(auto) is None
    file = ["--deepspeed_config", "scheduled.json"]
    write_checkpoint(start_run(Path("run"), *flags, *file).plan)
    kept = resumed(auto, LONGER)
    assert kept is not None
    assert kept.plan.ds_config["scheduler"]["params"]["total_num_steps"] == 50
    assert "total_num_steps 50" in _override_notes(kept)[0]
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: 80 asks for another"):
        resumed({**auto, "total_num_steps": 80}, LONGER)
    again = resumed(auto, LONGER, "--override=schedule")
    assert again is not None
    assert again.plan.ds_config["scheduler"]["params"]["total_num_steps"] == 80


@pytest.mark.parametrize(("kind", "divisible"), [("AdamW", True), ("NAdam", True), ("Muon", False),
                                                 ("Adafactor", False)])
def test_undivisible_states_are_rejected_in_another_layout(tmp_path: Path, flags: list[str], kind: str,
                                                           divisible: bool) -> None:
    """The engine also rejects them when it loads the states; this is before there is an engine."""
    def layout(stage: int, bucket: int = 1000, **others: dict[str, str]) -> list[str]:
        path = tmp_path / f"{stage}-{bucket}-{len(others)}.json"
        path.write_text(json.dumps({
            **others, "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
            "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
            "optimizer": {"type": kind, "params": {"lr": 0.01}}}))
        return [*flags, "--deepspeed_config", str(path)]

    run = tmp_path / "run"
    write_checkpoint(start_run(run, *layout(1)).plan)
    _resumed(run, *layout(1, bucket=2000))
    _resumed(run, *layout(1, data_types={"grad_accum_dtype": "bf16"}))  # the default, written out
    if divisible:
        _resumed(run, *layout(2))
        return
    with pytest.raises(ConfigError, match=rf"global_step10: zero_stage: 1 in .* and 2 in .* states of {kind}\. Resume"):
        _resumed(run, *layout(2))


CHANGES = {
    "lr": ["--learning_rate", "2e-2"], "weight_decay": ["--weight_decay", "0.3"], "betas": ["--adam_beta2", "0.9"],
    "eps": ["--adam_epsilon", "1e-6"], "clipping": ["--gradient_clipping", "0.5"], "loss": ["--z_loss", "1e-4"],
    "dropout": ["--residual_dropout", "0.1"], "seed": ["--seed", "7"],
    "schedule": ["--lr_schedule", "linear"]}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_needs_its_name(tmp_path: Path, flags: list[str], name: str) -> None:
    _saved(tmp_path, flags)
    changed = [*flags, *CHANGES[name]]
    with pytest.raises(ConfigError, match=rf"--override {name}\."):
        _resumed(tmp_path, *changed)
    others = ",".join(other for other in OVERRIDES if other != name)
    with pytest.raises(ConfigError, match=rf"--override {name}\."):
        _resumed(tmp_path, *changed, f"--override={others}")
    resume = _resumed(tmp_path, *changed, f"--override={name}")
    recorded = {each["name"] for each in resume.plan.overrides}
    assert recorded == {name}
    # a requeued job repeats its command: its checkpoint has the new values
    write_checkpoint(resume.plan)
    again = _resumed(tmp_path, *changed, f"--override={name}")
    assert (_override_notes(again), again.plan.overrides) == ([], resume.plan.overrides)


def test_a_name_without_a_change_is_a_note(tmp_path: Path, flags: list[str]) -> None:
    new = start_run(tmp_path, *flags, "--override=lr").plan
    assert "--override has no effect: the run begins at step 0" in new.notes
    _saved(tmp_path, flags)
    assert _override_notes(_resumed(tmp_path, *flags, "--override", "eps", "betas,lr")) == [
        f"--override {name} has no effect: {OVERRIDES[name]} is the same as in the checkpoint"
        for name in ("betas", "eps", "lr")]
    with pytest.raises(ConfigError, match=r"--override: found lrs; expected lr, schedule.* Did you mean .?lr"):
        _resumed(tmp_path, *flags, "--override=lrs")


def test_the_steps_that_tokens_leave_after_a_change_of_the_batch(tmp_path: Path, corpus: str) -> None:
    words = ["--train_data", corpus, "--split", "80,20,0", "--seq_length", "64", "--learning_rate", "1e-2",
             "--gradient_accumulation_steps", "2", "--micro_batch_size"]
    tokens = 50 * 8 * 64

    def resumed(*more: str) -> Plan:
        args = parse_arguments(["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json"), "--model", "tiny",
                                "--model_overrides", "vocab_size=256", "--train_tokens", str(tokens), "--save",
                                str(tmp_path), *words, *more])
        start = check_start(args, world_size=1, device=cpu_device())
        return start.resume.plan if start.resume else start.plan

    plan = resumed("4")
    assert (plan.train_steps, plan.layout.global_batch_size) == (50, 8)
    write_checkpoint(plan)  # step 10, sample 80: 320 samples remain
    with pytest.raises(ConfigError, match=r"global batch size: 8 in the checkpoint and 16.* --override batch"):
        resumed("8")
    changed = resumed("8", "--override=batch")
    assert changed.train_steps == 10 + 320 // 16
    assert changed.schedule == plan.schedule
    # a schedule that is planned again ends with the run; its lengths in tokens count from the run's start
    planned = resumed("8", "--override=batch,schedule", "--lr_warmup_tokens", str(5 * 8 * 64)).schedule
    assert planned is not None
    assert (planned.warmup_steps, planned.decay_steps) == (5, 30)
    planned = resumed("8", "--override=batch,schedule", "--lr_decay_tokens", str((80 + 5 * 16) * 64)).schedule
    assert planned is not None
    assert planned.decay_steps == 15
    write_checkpoint(changed, step=11, consumed_samples=96)
    (tmp_path / "checkpoints" / "global_step10").rename(tmp_path / "checkpoints" / "global_step11")
    assert resumed("8", "--override=batch").train_steps == 30
    assert resumed("8").train_steps == 30


def test_a_branch_is_the_state_of_the_other_run(tmp_path: Path, flags: list[str]) -> None:
    plan, manifest = _saved(tmp_path / "run", flags)
    source, step10 = tmp_path / "run", tmp_path / "run" / "checkpoints" / "global_step10"
    for name in (source, f"{source}@10", step10, source / "checkpoints"):
        branch = _resumed(tmp_path / "new", *flags, LONGER, "--resume_from", str(name))
        assert branch.folder == step10
        assert branch.branch is not None
        lineage, = branch.plan.lineage
        assert (lineage["run"], lineage["step"], lineage["folder"]) == (str(source), 10, str(step10))
        assert branch.plan.schedule == plan.schedule
    # the new run resumes from its own checkpoints; a branch of it has both steps in its lineage
    write_checkpoint(branch.plan, save_id="of the branch")
    own = _resumed(tmp_path / "new", *flags, LONGER, "--resume_from", f"{source}@10")
    assert (own.branch, own.folder.parents[1]) == (None, tmp_path / "new")
    assert own.plan.lineage == branch.plan.lineage
    second = _resumed(tmp_path / "third", *flags, LONGER, "--resume_from", str(tmp_path / "new"))
    assert [each["run"] for each in second.plan.lineage] == [str(source), str(tmp_path / "new")]
    with pytest.raises(ConfigError, match=r"it branched from step 10 of .*/run\. Leave --resume_from out"):
        _resumed(tmp_path / "new", *flags, LONGER, "--resume_from", f"{source}@11")
    assert [path.name for path in source.rglob("*") if path.is_file()] == [MANIFEST]
    assert json.loads((step10 / MANIFEST).read_text())["save_id"] == manifest.save_id


def test_a_branch_does_not_begin_again_without_its_mirror(tmp_path: Path, flags: list[str]) -> None:
    """The mirror may hold later checkpoints of the branch, which branching again would overwrite."""
    _saved(tmp_path / "run", flags)
    (tmp_path / "file").write_text("")
    plan = start_run(tmp_path / "new", *flags, f"--resume_from={tmp_path}/run").plan
    without = replace(plan, args=replace(plan.args, checkpoint_mirror=str(tmp_path / "mirror")))
    assert [found[0] for found in _candidates(without, print)] == [tmp_path / "run" / "checkpoints" / "global_step10"]
    unreadable = replace(plan, args=replace(plan.args, checkpoint_mirror=str(tmp_path / "file" / "mirror")))
    problem, = _candidates(unreadable, print)
    assert isinstance(problem, str)


def test_wrong_branches_are_rejected(tmp_path: Path, flags: list[str], corpus: str) -> None:
    source = tmp_path / "run"
    plan, _ = _saved(source, flags)
    imported = tmp_path / "imported"
    write_checkpoint(replace(plan, args=replace(plan.args, save=str(imported))), weights_only=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for words, line in (
            ([f"--resume_from={source}@30"], r"has no checkpoint of step 30\. The run has the step 10\."),
            ([f"--resume_from={tmp_path}/no"], f"there is no folder {tmp_path}/no"),
            ([f"--resume_from={tmp_path}/file"], "this is a file, and not a folder"),
            ([f"--resume_from={tmp_path}/empty"], "the folder holds no checkpoint"),
            ([f"--resume_from={tmp_path}/empty@3"], "the folder holds no checkpoint"),
            ([f"--resume_from={imported}"], f"holds weights alone.* --init_from {imported}"),
            ([f"--resume_from={source}", "--init_from=x"], "also --init_from x; expected one of the two"),
            ([f"--resume_from={source}", "--train_steps=10"], "is at step 10 of 10. Give more --train_steps"),
            ([f"--resume_from={source}", "--seed=7"], "--override seed"),
            ([f"--resume_from={source}", "--split=90,10,0"], "--override data"),
            ([f"--resume_from={source}", "--seq_length=32"], "--seq_length: 64 in the checkpoint and 32 in this run")):
        with pytest.raises(ConfigError, match=line):
            start_run(tmp_path / "new", *flags, *words)
    for name in (source, f"{source}@10", source / "checkpoints" / "global_step10"):
        with pytest.raises(ConfigError, match=re.escape(f"this is the run folder --save {source} itself")):
            start_run(source, *flags, "--resume_from", str(name))
    with pytest.raises(ConfigError, match="it did not begin with a branch"):
        start_run(source, *flags, "--resume_from", str(imported))
    path = source / "checkpoints" / "global_step10" / MANIFEST
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(ConfigError, match="the manifest is damaged"):
        start_run(tmp_path / "new", *flags, f"--resume_from={source}@10")
