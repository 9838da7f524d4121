"""Wrapped decoders: models that are built from transformers' own modules, for every `model_type` without a family.

| module | what it has |
| --- | --- |
| own_models.py | model classes of the user's own code (--model_code) |
| skeleton.py | `create_skeleton(config)`: transformers' model without memory for parameters; `Runner`: its `forward` |
| parts.py | `find_parts(model)` -> `Parts`: paths of embedding, decoder layers, head ...; or `UnknownPartsError` |
| find_layers.py | `find_layers(model, parts)`: the layers with parameters, buffers, windows, active parameters |
| decoder.py | `Decoder`: a skeleton with its parts and layers; `decoder_from(values)`, `decoder_of(config)` |
| read.py | `wrapped_config(values, where, overrides)`: a config.json -> `ModelConfig` |
| wrapped.py | `WrappedDecoder`: the implementation of such a config (model/implementation.py) |
| file_format.py | its tensors in weights files |
| carried.py | arguments of decoder layers that depend on the tokens: how they travel with the hidden states |
| modules.py | the torch modules of the layers |
| specs.py | `wrapped_specs`: the layers as specs of a pipeline, for `layer_specs.build_specs` |

`layer_specs.as_module(wrapped_config(values, where))` is the plain module. The names of a wrapped layer's parameters
in transformers' model are `Layer.their_names`.
"""
