"""The files of pretrain/pages/own_ideas.md on two ranks, and in other layouts: callback, optimizer, schedule, loss."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pretrain.callback import LoggedValue
from pretrain.config.ds_json.check_keys import check_json_keys
from pretrain.config.ds_json.read import DsFile
from pretrain.config.schedule import Schedule, schedule_from_json, schedule_text
from pretrain.errors import REJECTED, ConfigError
from pretrain.monitor.read_run_folder import read_events, read_metrics, read_rows
from pretrain.monitor.repeatable import check_repeatable, repeated_config, repeated_flags
from tests.support.cases import config, flags
from tests.support.launch import ROOT, train_ranks

PAGE = (ROOT / "pretrain/pages/own_ideas.md").read_text()
FILES = {re.match(r"# (\w+\.py)", code)[1]: code  # type: ignore[index]
         for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
SIGNS = {"type": "sign_momentum:SignMomentum", "params": {"lr": 1e-3, "beta": 0.95, "weight_decay": 0.1}}
# the cross-entropy of torch: a run with it must have the losses of a run without --loss
OTHERS = {"plain.py": "import torch.nn.functional as F\n"
                      "def loss(logits, labels):\n    return F.cross_entropy(logits, labels, reduction='none')\n"
                      "def mean(logits, labels):\n    return F.cross_entropy(logits, labels)\n"
                      "def bad(step, steps):\n    return -1\n"
                      "def fails(step, steps):\n    return 1 / 0\n",
          "matrixwise.py": "import torch\nclass NormSteps(torch.optim.SGD):\n    elementwise, num_states = False, 1\n"
                           "    def __init__(self, params, lr=1e-3):\n        super().__init__(params, lr=lr)\n"
                           "class Silent(torch.optim.SGD):\n    pass\n"
                           "class AdamW(torch.optim.SGD):\n    elementwise = True\n"
                           "class NoRate(torch.optim.SGD):\n    elementwise = True\n"
                           "    def __init__(self, params, rate=1):\n        super().__init__(params)\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (FILES | OTHERS).items():
        (tmp_path / name).write_text(code)
    return tmp_path


def train(folder: Path, corpus: str, values: dict[str, Any], *, ranks: int = 2, save: str = "run",
          code: int = 0, **others: Any) -> tuple[dict[int, float], str]:
    """Train 6 steps. Returns the losses of the logged steps, and the output."""
    (folder / "ds.json").write_text(json.dumps(values))
    given = {**flags(corpus, layers=2, hidden=32, steps=6), "save": save, "log_interval": 1, "eval_interval": 3,
             "save_interval": 3, **others}
    done = train_ranks(ranks, ["--deepspeed_config=ds.json", *(f"--{key}={value}" for key, value in given.items())],
                       folder)
    output = "".join(rank.stdout for rank in done)
    assert {rank.returncode for rank in done} == {code}, output
    return {row["step"]: row["loss"] for row in read_metrics(folder / save) if "loss" in row}, output


def parallel(**keys: Any) -> dict[str, Any]:
    return {**config(1, micro=2), **keys}


def test_each_change_takes_at_most_40_lines() -> None:
    assert set(FILES) == {"histograms.py", "sign_momentum.py", "two_phases.py", "focal.py"}
    assert all(len(code.splitlines()) <= 40 for code in FILES.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_callback_logs_values_of_all_ranks_and_writes_a_file(folder: Path, corpus: str, stage: int) -> None:
    """At ZeRO-3, each weight is divided between steps; the histograms are complete."""
    code = FILES["histograms.py"].replace("is_due(10)", "is_due(2)").replace("        if run.world.rank == 0", (
        "        run.log('rank', run.world.rank, 'sum')\n        run.log('highest', float(run.world.rank), 'max')\n"
        "        run.log('total', total)\n        if run.world.rank == 0"))
    (folder / "histograms.py").write_text(code)
    values = config(stage, micro=2)
    values["zero_optimization"] |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    train(folder, corpus, values, extension="histograms:Histograms")
    rows = {row["step"]: row for row in read_metrics(folder / "run") if "loss" in row}
    assert [step for step, row in rows.items() if "small_weights" in row] == [2, 4, 6]
    assert 0 < rows[2]["small_weights"] < 1
    assert (rows[2]["rank"], rows[2]["highest"]) == (1, 1)
    histograms = read_rows(folder / "run/histograms.jsonl")
    assert [row["step"] for row in histograms] == [2, 4, 6]
    assert all(0.9 * rows[2]["total"] < sum(row["counts"]) <= rows[2]["total"] for row in histograms)


WRONG = {
    "Typo": ("def after_rows(self, run, row):\n        pass", 'the class has no method that a run calls (it has '
             'after_rows). Did you mean "after_row"?'),
    "Arguments": ("def __init__(self, limit):\n        pass\n    def after_row(self, run, row):\n        pass",
                  "the class is made without arguments: missing a required argument: 'limit'"),
    "State": ("def state(self):\n        return {1}", "callback State: JSON cannot represent its state"),
    "Loss": ("def row_values(self, run, ranks):\n        return {'loss': 1.0}",
             "row_values of a callback: loss: the rows of steps have this key already"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_callback_that_cannot_work_is_rejected_in_one_line(name: str, folder: Path, corpus: str) -> None:
    """Before the first step, but for the key of a row."""
    code, line = WRONG[name]
    (folder / "wrong.py").write_text(f"from pretrain.callback import Callback\nclass {name}(Callback):\n    {code}\n")
    losses, output = train(folder, corpus, config(1, micro=2), extension=f"wrong:{name}", code=REJECTED)
    assert line in output
    assert losses == {}


def test_a_name_that_rows_have_ends_the_run_with_one_line(folder: Path, corpus: str) -> None:
    (folder / "taken.py").write_text("from pretrain.callback import Callback\nclass Taken(Callback):\n"
                                     "    def after_step(self, run, result):\n        run.log('lr', 1.0)\n")
    _, output = train(folder, corpus, config(1, micro=2), extension="taken:Taken", code=REJECTED)
    assert "run.log('lr'): the rows of steps have this key already. Choose another name." in output


def test_values_of_steps_and_ranks_are_combined() -> None:
    import numpy as np
    import torch

    mean, highest = LoggedValue("mean"), LoggedValue("max")
    for value in (1.0, torch.tensor([4.0])):
        mean.add(value)
        highest.add(value)
    highest.add(torch.tensor(2.0))
    assert (mean.of_rank(), highest.of_rank()) == (2.5, 4.0)
    assert mean.of_all(np.array([1.0, np.nan, 3.0])) == 2.0
    assert np.isnan(highest.of_all(np.array([np.nan])))


@pytest.mark.parametrize("stage", [0, 3])
def test_an_elementwise_optimizer_resumes_in_another_layout(folder: Path, corpus: str, stage: int) -> None:
    """The same losses in ZeRO-1 on two ranks, and with a resume in another layout after step 3."""
    whole, _ = train(folder, corpus, parallel(optimizer=SIGNS))
    train(folder, corpus, parallel(optimizer=SIGNS), save="parts", exit_step=3)
    parts, _ = train(folder, corpus, {**config(stage, micro=2), "optimizer": SIGNS}, save="parts")
    assert parts == pytest.approx(whole, abs=2e-4)
    assert parts != train(folder, corpus, config(1, micro=2), save="adam")[0]


def test_a_matrixwise_optimizer_is_rejected_where_its_states_would_be_divided(folder: Path, corpus: str) -> None:
    norms = {"type": "matrixwise:NormSteps", "params": {"lr": 0.01}}
    _, output = train(folder, corpus, parallel(optimizer=norms), code=REJECTED)
    assert "ds.json:1: optimizer.type: matrixwise:NormSteps with ZeRO computes norms of parts of the matrices" in output
    losses, _ = train(folder, corpus, {**config(0, micro=2), "optimizer": norms}, exit_step=3)
    assert len(losses) == 3
    accepted = {**config(1, micro=2), "optimizer": norms, "zero_allow_untested_optimizer": True}
    _, output = train(folder, corpus, accepted, code=REJECTED)
    assert "another layout cannot divide the states of matrixwise:NormSteps" in output


@pytest.mark.parametrize(("kind", "line"), [
    ("matrixwise:Silent", "Silent does not say whether it is elementwise. Add the line elementwise = True"),
    ("matrixwise:AdamW", "another optimizer has a class with the name AdamW. Rename the class"),
    ("matrixwise:NoRate", "NoRate has no argument lr. An optimizer is made as MyOptimizer(groups, lr=...)."),
    ("matrixwise:Nothing", "the module matrixwise has no Nothing."),
    ("no_such:Opt", "there is no module no_such in")])
def test_a_wrong_optimizer_gets_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, line: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as error:
        check_json_keys(DsFile("ds.json", {"optimizer": {"type": kind, "params": {"lr": 1}}}, imports_code=True))
    assert str(error.value).startswith(f"ds.json: optimizer.type: {kind}: {line}")
    assert "\n" not in str(error.value)


def test_a_schedule_sets_the_rates_and_resumes(folder: Path, corpus: str) -> None:
    given: dict[str, Any] = {"lr_schedule": "two_phases:schedule", "lr_warmup_steps": 2}
    train(folder, corpus, config(1, micro=2), exit_step=3, **given)
    train(folder, corpus, config(2, micro=2), **given)
    rates = [row["lr"] for row in read_metrics(folder / "run") if "loss" in row]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4])
    _, output = train(folder, corpus, config(1, micro=2), train_steps=8, code=REJECTED)
    assert "another learning-rate schedule" in output or "--lr_schedule" in output


@pytest.mark.parametrize(("given", "line"), [
    ({"lr_schedule": "plain:bad"}, "--lr_schedule plain:bad: found the rate -0.001 at step 1; expected a finite"),
    ({"lr_schedule": "plain:fails"}, "--lr_schedule plain:fails: the schedule at step 1 failed: ZeroDivisionError"),
    ({"lr_schedule": "two_phases:schedule", "min_lr_ratio": 0.1}, "--min_lr_ratio: found 0.1 with --lr_schedule"),
    ({"lr_schedule": "two_phases:none"}, "the module two_phases has no none"),
    ({"loss": "focal"}, "--loss: found focal; expected a module and a name in it, such as my_module:loss."),
    ({"loss": "focal:loss", "z_loss": 0.1}, "--z_loss: it is a term of the cross-entropy, which --loss replaces."),
    ({"loss": "plain:mean"}, "--loss: found losses of shape []; expected one for each token")])
def test_wrong_schedules_and_losses_get_one_line(folder: Path, corpus: str, given: dict[str, Any], line: str) -> None:
    _, output = train(folder, corpus, config(1, micro=2), ranks=1, code=REJECTED, **given)
    assert line in output


def test_a_schedule_next_to_one_of_the_json_is_rejected(folder: Path, corpus: str) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    _, output = train(folder, corpus, parallel(scheduler=scheduler), lr_schedule="two_phases:schedule", code=REJECTED)
    assert "lr_schedule" in output
    assert "scheduler" in output


LAYOUTS = {"zero0": config(0, micro=2), "zero2": config(2, micro=2), "zero3": config(3, micro=2),
           "pipeline": config(1, micro=4, accumulation=2, stages=2),
           "tensor": parallel(tensor_parallel={"autotp_size": 2}, train_micro_batch_size_per_gpu=4),
           "sequence": {**config(2, micro=4), "sequence_parallel_size": 2},
           "bf16": config(1, micro=2, precision="bf16")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_is_the_same_in_each_layout(folder: Path, corpus: str, layout: str) -> None:
    """The cross-entropy as the user's loss trains as without the flag, and the focal loss as in ZeRO-1."""
    values, tolerance = LAYOUTS[layout], 2e-2 if layout == "bf16" else 5e-4
    plain, _ = train(folder, corpus, values, save="plain", loss="plain:loss")
    assert plain == pytest.approx(train(folder, corpus, values, save="without")[0], abs=tolerance)
    reference, _ = train(folder, corpus, config(1, micro=2), save="reference", loss="focal:loss")
    focal, _ = train(folder, corpus, values, save="focal", loss="focal:loss")
    assert focal == pytest.approx(reference, abs=tolerance)
    rows = [row for row in read_metrics(folder / "focal") if "eval_loss" in row]
    assert rows[-1]["eval_loss"] > 5  # the cross-entropy, and not the focal loss
    assert abs(focal[6] - plain[6]) > 1e-3


def test_a_record_imports_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "evil.py").write_text("raise SystemExit('imported')\n")
    record = {"flags": {"lr_schedule": "evil:f", "loss": "evil:f", "seed": 5},
              "given_deepspeed_config": {"optimizer": {"type": "evil:Opt"}, "bf16": {"enabled": True}}}
    assert repeated_flags(record) == {"seed": 5}
    assert repeated_config(record) == {"bf16": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"optimizer.type: the run used evil:Opt, your own code"):
        check_repeatable(record)
    with pytest.raises(ConfigError, match="expected one of"):
        check_json_keys(DsFile("", {"optimizer": {"type": "evil:Opt"}}))
    saved = schedule_from_json({"kind": "evil:f", "peak": 1.0, "min_ratio": 0.1, "warmup_steps": 1, "decay_steps": 5,
                                "wsd_steps": 0})
    assert isinstance(saved, Schedule)
    assert "evil:f" in schedule_text(saved)
    with pytest.raises(ConfigError, match="a record alone never imports"):
        saved(3)


def test_events_have_no_new_kinds(folder: Path, corpus: str) -> None:
    train(folder, corpus, config(1, micro=2), loss="focal:loss", lr_schedule="two_phases:schedule")
    assert {row["event"] for row in read_events(folder / "run")} <= {"start", "save", "stop"}
