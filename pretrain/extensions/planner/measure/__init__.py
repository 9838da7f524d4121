"""Memory of real engines: an inventory of tensors, short runs on this machine, and simulated ranks."""
