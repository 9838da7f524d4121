"""Files of the tiktoken library as tokenizers."""
