"""Optimizers of other programs are recognized by the states and settings in their files, and others are rejected."""

from typing import Any

import pytest
import torch

from pretrain.errors import ConfigError
from pretrain.extensions.adopt.mapping import names_by_shape, names_by_values
from pretrain.extensions.adopt.optimizers import UNKNOWN_DECAY, Recognized, recognize


def states_of(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the states with a number for each weight, after one step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {key for state in optimizer.state.values() for key, value in state.items()
            if torch.is_tensor(value) and value.dim() > 0}


def found(name: str, ds_config: dict[str, Any] | None = None, **settings: Any) -> Recognized:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(3))], lr=0.1, **settings)
    return recognize("file", optimizer.state_dict()["param_groups"], states_of(optimizer), ds_config)


@pytest.mark.parametrize(("name", "settings", "states"), [
    ("AdamW", {"weight_decay": 0.2}, ("exp_avg", "exp_avg_sq")), ("SGD", {"momentum": 0.9}, ("momentum_buffer",)),
    ("SGD", {}, ()), ("Adagrad", {"eps": 1e-7}, ("sum",))])
def test_optimizers_of_torch(name: str, settings: dict[str, Any], states: tuple[str, ...]) -> None:
    optimizer = found(name, **settings)
    assert (optimizer.type, optimizer.states) == (name, states)
    assert optimizer.params.items() >= {"lr": 0.1, **settings}.items()


def test_adam_with_decay_in_the_gradient() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    states = ("exp_avg", "exp_avg_sq")
    in_json = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    assert recognize("file", [group], states, in_json).params["adam_w_mode"] is False
    assert recognize("file", [group], states, {"optimizer": {"type": "Adam", "params": {}}}).type == "AdamW"
    assert recognize("file", [group], states, {}).omissions == (UNKNOWN_DECAY,)
    assert recognize("file", [{**group, "weight_decay": 0.0}], states, {}).omissions == ()
    lion = {key: value for key, value in group.items() if key != "eps"}
    assert recognize("file", [lion], states, {}).states == ("exp_avg",), "DeepSpeedCPULion has an unused state"


def test_settings_in_which_groups_differ_are_a_loss() -> None:
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "decoupled_weight_decay": True,
             "amsgrad": False}
    states = ("exp_avg", "exp_avg_sq")
    assert recognize("file", [group, {**group, "weight_decay": 0.0}], states, {}).omissions == ()
    warm = [{**group, "initial_lr": 0.2}, {**group, "lr": 0.05, "initial_lr": 0.1, "betas": (0.9, 0.99)}]
    (loss,) = recognize("file", warm, states, {}).omissions
    assert loss.name == "other_states"
    assert "lr 0.2 and 0.1, betas (0.9, 0.95) and (0.9, 0.99); here" in loss.reason


@pytest.mark.parametrize(("name", "settings"), [
    ("RAdam", {}), ("NAdam", {}), ("Adamax", {}), ("RMSprop", {}), ("Adadelta", {}), ("AdamW", {"amsgrad": True}),
    ("AdamW", {"maximize": True})])
def test_others_are_rejected(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not one that can be continued here"):
        found(name, **settings)


def test_names_follow_only_if_they_are_unique() -> None:
    """The order, the shapes and the values of parameters name them; nothing else is guessed."""
    weights = {name: torch.full(shape, value) for name, shape, value in (
        ("a", (2, 2), 1.0), ("b", (2,), 2.0), ("c", (2, 2), 3.0), ("d", (2,), 4.0))}

    def named(*groups: str, masters: bool = False) -> list[list[str]]:
        numbers = iter(range(4))
        parameters = [{"params": [next(numbers) for _ in group]} for group in groups]
        state = {number: {"exp_avg": weights[name]} for number, name in enumerate("".join(groups))}
        return names_by_shape("file", parameters, state, weights,
                              [[weights[name].double() for name in group] for group in groups] if masters else None)

    assert named("ac", "bd") == [["a", "c"], ["b", "d"]]
    assert named("abcd") == [["a", "b", "c", "d"]]
    assert named("ad", "bc", masters=True) == [["a", "d"], ["b", "c"]]
    for groups, masters in ((("ad", "bc"), False), (("abdc",), False), (("abc",), False)):
        with pytest.raises(ConfigError):
            named(*groups, masters=masters)
    with pytest.raises(ConfigError, match="order of the model"):
        named("da", "bc", masters=True)
    flats = [torch.cat([weights[name].view(-1) for name in group]) for group in ("ad", "bc")]
    assert names_by_values("file", flats, weights) == [["a", "d"], ["b", "c"]]
    with pytest.raises(ConfigError, match="next place of several groups"):
        names_by_values("file", [weights["b"], weights["b"]], {"b": weights["b"], "d": weights["b"]})
