"""Read checkpoints of a plain DeepSpeed engine, of transformers.Trainer, and in DeepSpeed's universal format."""
