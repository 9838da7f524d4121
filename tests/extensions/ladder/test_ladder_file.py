"""The file ladder.json: written and read, expected losses between its points, and damaged files."""

import dataclasses
import json
from math import exp, log
from statistics import NormalDist

import pytest

from pretrain.errors import ConfigError
from pretrain.extensions.ladder.expected_curve import LEVEL, CurvePoint, Target, counted_parameters, read_ladder
from pretrain.extensions.ladder.ladder_file import DECAYED, STABLE, Ladder, Law, Point, Range, write_ladder
from pretrain.model.config import load_model_config
from pretrain.stored_json import build, read_object

LAW = Law(1.8, 480.0, 2080.0, 0.35, 0.37, noise=0.01, samples=[[1.7, 400.0, 2000.0, 0.34, 0.36]] * 3)


def example() -> Ladder:
    points = [Point("w128", 1e6, 2e7, 4.5), Point("w256", 4e6, 2e7, 4.0, decayed=False),
              Point("w512", 1.6e7, 4e7, 3.5, held_out=True)]
    curve = [CurvePoint(1e6, 6.0, 5.5, 6.5), CurvePoint(4e6, 5.0, 4.8, 5.2), CurvePoint(6.4e7, 3.0, 2.9, 3.1)]
    return Ladder({"train": "ab12"}, 512, "llama", "mup", points, {DECAYED: LAW, STABLE: LAW}, Range.of(points),
                  Target(1.6e7, 6.4e7, 8192, 3.0, 2.9, 3.1, curve))


def test_written_and_read(tmp_path):
    write_ladder(tmp_path / "ladder.json", example())
    found = build(Ladder, read_object(tmp_path / "ladder.json"))
    assert found == example()
    assert read_ladder(tmp_path / "ladder.json")["target"] == example().target
    assert found.range == Range([1e6, 4e6], [2e7, 2e7])  # without the held-out point
    target = found.target
    assert target.at(2e6).loss == pytest.approx(5.5)  # half way in log(tokens)
    assert (target.at(1e6).low, target.at(6.4e7).high) == (5.5, 3.1)
    assert target.at(0.9e6) is None
    assert target.at(6.5e7) is None


@pytest.mark.parametrize(("change", "problem"), [
    (lambda d: d.update(format="ds-pretrain ladder 2"), 'its "format" is not'),
    (lambda d: d.pop("corpus"), "corpus is missing"),
    (lambda d: d["target"].update(curve=[]), "fewer than two points"),
    (lambda d: d["target"]["curve"].reverse(), "ascending"),
    (lambda d: d["target"]["curve"][1].update(high=4.9), r"target.curve\[1\]"),
    (lambda d: d["target"].update(tokens_per_step=0), "tokens_per_step"),
    (lambda d: d["target"]["curve"][0].update(loss="low"), r"target.curve\[0\].loss"),
])
def test_damaged_files(tmp_path, change, problem):
    values = dataclasses.asdict(example())
    change(values)
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=rf"^--expected_curve: .*ladder\.json.*{problem}"):
        read_ladder(path)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_ladder(tmp_path / "ladder.json")


def test_interval_of_one_normal_distribution():
    """With equal samples, the interval is that of a normal distribution of log L."""
    sample = [1.8, 480.0, 2080.0, 0.35, 0.37]
    found = Law(*sample, noise=0.02, samples=[sample] * 5).predict(1e9, 2e10)
    deviations = NormalDist().inv_cdf((1 + LEVEL) / 2)
    loss = 1.8 + 480 / 1e9**0.35 + 2080 / 2e10**0.37
    assert found.loss == pytest.approx(loss)
    assert (log(found.high / loss), log(loss / found.low)) == pytest.approx((0.02 * deviations,) * 2)
    # Two laws that differ more than their noise: the quantiles lie in the two distributions.
    apart = Law(1.0, 0, 0, 0, 0, noise=0.01, samples=[[1.0, 0, 0, 0, 0], [2.0, 0, 0, 0, 0]])
    tail = 0.01 * NormalDist().inv_cdf(LEVEL)
    assert (apart.predict(1, 1).low, apart.predict(1, 1).high) == pytest.approx((exp(-tail), 2 * exp(tail)))


def test_counted_parameters():
    """GPT-2's blocks and last norm: 12 layers of 12 d^2 + 13 d, and 2 d; without embeddings and positions."""
    assert counted_parameters(load_model_config("gpt2")) == 12 * (12 * 768**2 + 13 * 768) + 2 * 768
