"""Memory of the casts to FP8."""

from pretrain.model.description import ModelConfig
from pretrain.model.operator_memory import FP32, MicroBatch, OperatorMemory, qkv_width, query_width


class Fp8Memory(OperatorMemory):
    """Memory of the products in products.py."""

    def work(self, config: ModelConfig, batch: MicroBatch) -> int:
        """Return the bytes that the largest product of a block needs in addition to its operands and its result.

        One operand at a time is cast by way of fp32. The FP8 values of both remain; on CUDA, those of the second one
        are copied into another order. The emulation converts both to fp32 again, and its product from fp32.
        """
        hidden, inner, ways = config.hidden_size, config.intermediate_size // batch.mlp_tiles, []
        for inputs, outputs in ((hidden, qkv_width(config, batch)), (query_width(config, batch), hidden),
                                (hidden, inner), (inner, hidden)):
            x, weight, out = batch.tokens * inputs, inputs * outputs, batch.tokens * outputs
            for first, second, result in ((x, weight, out), (out, weight, x), (out, x, weight)):
                casts = max((FP32 + 1) * first, first + (FP32 + 1) * second)
                emulated = (FP32 + 1) * (first + second) + FP32 * result
                ways.append(max(casts, first + 2 * second) if batch.cuda else emulated)
        return max(ways)
