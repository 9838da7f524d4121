"""Look at data: the documents of token files, and the tensors of a step of a run. Never imports deepspeed."""
