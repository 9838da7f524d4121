"""Mixture of experts: a block's MLP of which each token uses a few parts."""
