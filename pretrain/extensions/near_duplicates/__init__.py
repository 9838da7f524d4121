"""Near-duplicates: documents that are similar to an earlier one."""
