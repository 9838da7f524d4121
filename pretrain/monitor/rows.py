"""The keys of metrics.jsonl, and the events of events.jsonl. `ds-pretrain reference` prints them.

"Over the steps" means over all steps since the last row; means and maxima over ranks are over all ranks of the run.
"""

from pretrain.active_extensions import for_each_extension

# key -> (unit, definition); the rows of extensions follow
TRAINING_ROW = {
    "step": ("steps", "number of optimizer steps, from 1"),
    "time": ("s", "when the row was written, since 1970"),
    "consumed_samples": ("samples", "read from the training data up to this step"),
    "consumed_tokens": ("tokens", "the same; a sample has `--seq_length` tokens"),
    "seq_length": ("tokens", "of the sequences of this step"),
    "global_batch_size": ("samples", "of this step"),
    "loss": ("nats per token", "cross-entropy of this step's global batch before the update, mean over the tokens that "
                               "count"),
    "loss_max": ("nats per token", "highest mean loss that a data-parallel rank had in one step, over the steps"),
    "lr": ("", "learning rate of this step"),
    "grad_norm": ("", "2-norm of the gradient of all parameters before clipping, without the loss scale"),
    "grad_norm_max": ("", "its maximum over the steps; skipped updates do not count"),
    "clip_norm": ("", "the limit of clipping; `null` without clipping"),
    "clip_rate": ("fraction", "of the steps, those whose gradient was clipped"),
    "param_norm": ("", "2-norm of all parameters after this step; a tied matrix counts once"),
    "update_ratio": ("", "2-norm of the change of the parameters in this step, divided by the 2-norm of the parameters "
                         "before it"),
    "loss_scale": ("", "of fp16; otherwise 1"),
    "skipped_steps": ("steps", "updates that the engine has skipped since the start or resume"),
    "step_time_ms": ("ms", "mean over the steps, without saves, evaluations and profiles"),
    "data_time_ms": ("ms", "of it, waiting for data: mean over the steps, on the rank that waited longest"),
    "forward_time_ms": ("ms", "forward pass: mean over the steps and ranks"),
    "backward_time_ms": ("ms", "backward pass: the same mean"),
    "optimizer_time_ms": ("ms", "clipping and update: the same mean"),
    "reduce_time_ms": ("ms", "reduction of gradients: the same mean; `null` if it overlaps with the backward pass"),
    "save_time_ms": ("ms", "time in which training waited for saves since the last row"),
    "eval_time_ms": ("ms", "the same for evaluations"),
    "pipeline_bubble": ("fraction", "of the time of a step in which a pipeline stage computes nothing; `null` without "
                                    "pipeline stages"),
    "tokens_per_second": ("1/s", "of all ranks, over the steps"),
    "tflops_per_device": ("TFLOP/s", "by the usual convention"),
    "mfu": ("fraction", "`tflops_per_device` of the device's peak; `null` on a CPU and on unknown devices"),
    "tflops_exact_per_device": ("TFLOP/s", "by the exact convention"),
    "mfu_exact": ("fraction", "`tflops_exact_per_device` of the device's peak"),
    "memory_bytes": ("bytes", "tensors on rank 0's GPU now; on a CPU the resident memory of its process"),
    "peak_memory_bytes": ("bytes", "the same at the peak"),
    "host_memory_bytes": ("bytes", "resident memory of rank 0's process"),
    "power_watts": ("W", "drawn by a GPU in this moment, mean over the GPUs; needs NVIDIA's NVML and the package "
                         "nvidia-ml-py"),
    "eta_seconds": ("s", "remaining samples at the speed of these steps"),
    "goodput": ("fraction", "time of all steps that were kept, of the time since the first start of the run"),
}
# keys that exist with some flags and models only
OPTIONAL_KEYS = {
    "z_loss": ("nats per token", "with `--z_loss`: its part of the training loss, mean over the steps"),
    "load_balancing_loss": ("", "with experts: load-balancing loss without its coefficient; the number of experts per "
                                "token if the load is balanced. Mean over layers, micro-batches and ranks"),
    "router_z_loss": ("", "with experts: mean squared logsumexp of the routers' logits, the same mean"),
    "expert_load_max": ("ratio", "with experts: tokens of the expert with the most tokens, relative to the mean; the "
                                 "highest of all layers"),
    "dropped_tokens": ("fraction", "with experts: assignments of tokens to experts that `--expert_capacity_factor` "
                                   "dropped"),
    "router_entropy": ("nats", "with experts: entropy of the routers' probabilities, mean over tokens"),
    "noise_scale": ("samples", "with `--noise_scale_interval`: estimated gradient noise scale"),
}
EVALUATION_ROW = {
    "step": ("steps", "number of optimizer steps before the evaluation"),
    "time": ("s", "when the row was written, since 1970"),
    "consumed_samples": ("samples", "read from the training data up to this step"),
    "split": ("", "`valid`, `valid/NAME` or `test`"),
    "eval_loss": ("nats per token", "cross-entropy, mean over the tokens that count"),
    "eval_ppl": ("", "perplexity: e to the loss"),
    "mean_of_sets": ("sets", "only for a mean over named sets: their number"),
}

# event -> (keys besides time, event, step and reason, separated by spaces; meaning); the events of extensions follow
EVENTS = {
    "start": ("world_size", "training begins, also after a resume; with a key for each operator that was chosen"),
    "init": ("name folder fingerprint", "the run starts from these weights"),
    "resume": ("path", "the run continues from this checkpoint"),
    "branch": ("run folder fingerprint", "the run continues from this checkpoint of another run"),
    "override": ("name setting from to", "`--override` changed a setting of the checkpoint"),
    "verify": ("", "something at the start that is worth a warning, such as a damaged checkpoint that was passed over"),
    "save": ("path bytes seconds finite", "a checkpoint was committed; `finite` is false if it holds NaN "
                                          "or infinity"),
    "snapshot": ("seconds", "`--async_save` has copied the states to host memory, and training continues"),
    "save_failed": ("", "a checkpoint could not be written; earlier ones are unchanged"),
    "save_skipped": ("", "`--save_busy skip` left out a save, because the previous one was still being written"),
    "after_save_failed": ("", "a committed checkpoint could not be mirrored, or older ones not be removed"),
    "mirror": ("path seconds", "a checkpoint was copied to `--checkpoint_mirror`"),
    "prune": ("path", "`--keep_checkpoints` removed a checkpoint"),
    "batch": ("global_batch_size before consumed_samples", "`--batch_schedule` changed the global batch size"),
    "skip": ("samples epoch position sources",
             "an update was skipped; `samples` are the first one of its global batch, and the first one after it"),
    "spike": ("name value mean std z action samples epoch position sources",
              "a spike of the loss or the gradient norm, or NaN or infinity"),
    "no_gradient": ("samples epoch position sources",
                    "the gradient norm is exactly 0 in one of the first ten steps of a start"),
    "rollback": ("number to_step skipped_samples abandoned", "the run returned to an earlier checkpoint"),
    "data_hashed": ("sha256 bin_bytes bin_mtime_ns name", "a source of the training data was hashed completely"),
    "other_data": ("", "the data is not that of the checkpoint, which `--override data` allows"),
    "corruption": ("", "copies of a parameter differ between ranks"),
    "hang": ("ranks path", "a rank made no progress within its time-out"),
    "early_stop": ("best best_step", "`--early_stopping_patience` ended the run"),
    "signal": ("", "a signal, a file such as `RUN/STOP` or a time limit asks the run for something, such as to save "
                   "or to stop"),
    "stop": ("exit_code is_done", "the run has ended: finished, stopped, or stopped by the guard with exit code 76"),
}
for_each_extension(lambda extension: EVENTS.update(extension.events))
for_each_extension(lambda extension: TRAINING_ROW.update(extension.metrics))
