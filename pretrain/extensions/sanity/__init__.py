"""Checks of a run before it is trained: its data, model, gradients and optimizer (`ds-pretrain sanity`)."""
