"""Text to tokens to samples: corpus, tokenizer, .bin/.idx files, sample order, batches."""
