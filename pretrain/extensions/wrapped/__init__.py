"""Decoders of transformers without a family here: transformers' own modules compute their layers.

- `read.py`: a config.json becomes a ModelConfig.
- `wrapped_decoder.py`: the implementation of such a model (pretrain/model/implementation.py), and its weights files.
- `decoder.py`: transformers' model with its parts, and runs of its forward function (`runner.py`).
- `parts.py`: embedding, decoder layers, head ...
- `modules.py`: the torch modules of the layers, and their specs for a pipeline.
- `layer_memory.py`: the memory of the layers, measured.
- `prove.py`: the proof that a model trains as transformers' own, on a tiny copy of its config (`tiny.py`).
- `main.py`: `ds-pretrain models`; `all_decoders.py` proves many models, each in a process of its own.
"""
