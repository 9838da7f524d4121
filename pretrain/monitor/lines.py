"""The lines of text that a run prints for its rows of metrics.jsonl."""

from typing import Any


def format_duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 1:02:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


def row_line(row: dict[str, Any], *, train_steps: int, fp16: bool, columns: int | None) -> str:
    """Format a training row as a line of text.

    If the line is longer than `columns`, its last parts are dropped. They are the least important parts, and the status
    line also shows the speed and the ETA.
    """
    parts = [f"step {row['step']:>7}/{train_steps}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}",
             f"grad norm {row['grad_norm']:.3f}"]
    if fp16:
        parts.append(f"scale {row['loss_scale']:g} (skipped {row['skipped_steps']})")
    parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else f"{row['tflops_per_device']:.2f} TFLOP/s")
    parts += [f"{row['memory_bytes'] / 2**30:.1f} GiB", f"ETA {format_duration(row['eta_seconds'])}"]
    while columns is not None and len("  ".join(parts)) > columns and len(parts) > 2:
        parts.pop()
    return "  ".join(parts)


def evaluation_line(row: dict[str, Any]) -> str:
    """Format an evaluation row as a line of text."""
    note = f"  (mean of {row['mean_of_sets']} sets)" if "mean_of_sets" in row else ""
    return (f"step {row['step']:>7}  {row['split']} loss {row['eval_loss']:.4f}  perplexity {row['eval_ppl']:.2f}"
            f"{note}")
