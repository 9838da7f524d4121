"""Footprint: sums, and conversion to JSON and back."""

import json

import pytest

from pretrain.memory.footprint import Footprint


def test_footprints_add() -> None:
    footprint = Footprint({("parameters", "device"): 5, ("gradients", "host"): 7})
    assert (footprint + footprint).total() == 24
    assert footprint.states("host") == 7


def test_conversion_to_json_and_back_keeps_a_footprint() -> None:
    footprint = Footprint({("parameters", "device"): 5, ("gradients", "host"): 7})
    assert Footprint.of_json(json.loads(json.dumps(footprint.to_json()))) == footprint


def test_unknown_roles_are_rejected() -> None:
    with pytest.raises(ValueError, match="weights"):
        Footprint({("weights", "device"): 1})
