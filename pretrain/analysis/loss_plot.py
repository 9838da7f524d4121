"""Draw the loss curve of a run as an SVG file."""

from pathlib import Path

from pretrain.analysis.summary import summarize
from pretrain.errors import ConfigError
from pretrain.monitor.read_run_folder import is_number, newest_path, read_metrics


def save_loss_plot(run: Path, target: Path) -> None:
    """Draw the training and validation loss of `run` over its steps, and the unigram entropy of its `Summary`.

    The same metrics produce the same file. Raises ConfigError if matplotlib is not installed, if `target` does not end
    with .svg or cannot be written, or if a file of the run cannot be read.
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
    named = sorted({str(row["split"]) for row in rows if str(row.get("split")).startswith("valid/")})
    mean = "validation loss (mean)" if named else "validation loss"
    for key, split, label, style in (("loss", None, "training loss", "-"), ("eval_loss", "valid", mean, "o"),
                                     *(("eval_loss", name, name, ".") for name in named)):
        found = newest_path([row for row in rows if key in row and row.get("split") == split])
        points = [(row["step"], row[key]) for row in found if is_number(row[key])]  # null: NaN or infinity
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if entropy is not None:
        axes.axhline(entropy, color="grey", linestyle="--", linewidth=1, label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss"}):
            figure.savefig(target, metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"--plot {target}", problem=f"the file cannot be written: {error.strerror}") from None
