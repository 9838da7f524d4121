"""Parts of parameters, and collective operations on the tensors that ranks share."""
