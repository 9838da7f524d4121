"""Find the documents of training data that contain text of evaluation sets, and write the data without them.

A match is a run of n tokens, 13 by default, that a training document and an evaluation document share. GPT-3 (arXiv
2005.14165, appendix C) and lm-evaluation-harness compare 13 words, Llama 2 (arXiv 2307.09288, appendix A.6) compares
more than 10 tokens. Tokens are what the training data has, and need no decoding.
"""
