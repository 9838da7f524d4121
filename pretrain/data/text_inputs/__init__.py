"""Read documents from files, folders and standard input: text, JSON lines and Parquet, also compressed.

`find_inputs` lists and checks the inputs. `read_chunks` reads an input as a stream of chunks, each with the position
after it. `documents` decodes a chunk; it needs nothing but the chunk, so it can run in another process.
"""
