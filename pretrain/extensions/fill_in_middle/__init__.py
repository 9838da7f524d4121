"""Fill-in-the-middle: documents whose middle is moved to their end, so that a model learns to fill a gap."""
