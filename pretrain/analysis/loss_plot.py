"""Loss curve of a run, drawn as an SVG."""

from pathlib import Path

from pretrain.analysis.summary import summarize
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import read_metrics


def save_loss_plot(run: Path, target: Path) -> None:
    """Draw the training and validation loss of `run` over its steps, and the unigram entropy of the validation data.

    The same metrics give the same file. Raises ConfigError without matplotlib, or if `target` cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", problem="matplotlib is not installed", remedy="pip install -e '.[plot]'") from None
    if target.suffix.lower() != ".svg":
        raise ConfigError("--plot", found=str(target), expected="a file name that ends with .svg")
    rows, entropy = read_metrics(run), summarize(run).unigram_entropy
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training loss", "-"), ("eval_loss", "validation loss", "o")):
        points = [(row["step"], row[key]) for row in rows if key in row and row.get("split") in (None, "valid")]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if entropy is not None:
        axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy of the validation data")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss"}):
            figure.savefig(target, metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"--plot {target}", problem=f"the file cannot be written: {error.strerror}") from None
