"""Make token files from text: read input files of several formats, tokenize in worker processes, write and summarize.

Does not import torch: each worker process would need its memory.
"""
