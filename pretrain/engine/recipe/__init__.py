"""Clipping, noise scale, early stopping and terms of the loss, as the flags ask for them."""
