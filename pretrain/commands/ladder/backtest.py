"""A backtest of the law on the points of a CSV file."""

from pathlib import Path

from pretrain.analysis.scaling.points import backtest, read_points
from pretrain.errors import ConfigError


def points_main(file: Path) -> int:
    """Fit the law without the held-out points, or the largest model, print its predictions, and return 0.

    Raises ConfigError.
    """
    points = read_points(file)
    try:
        found = backtest(points)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--points {file}", problem=str(error)) from None
    print("\n".join(found.lines()))
    return 0
