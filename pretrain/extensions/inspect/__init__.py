"""A look at data: documents, and the tensors of a step of a run."""
