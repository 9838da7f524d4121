"""Documents that have been seen: exact duplicates by the digest of their tokens, similar ones by signatures."""
