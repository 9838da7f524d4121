"""C functions for bf16 tensors on CPUs, where torch has no fast operator, and the Python functions that call them."""
