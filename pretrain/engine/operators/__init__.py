"""Choice and compilation of operators."""
