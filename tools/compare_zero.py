#!/usr/bin/env python3
"""Compare layouts of a model (ZeRO stage, offload, pipeline stages, ...): memory and step time of each one.

    python tools/compare_zero.py --model gpt3-13b --world_size 64
"""

from pretrain.cli import run_main
from pretrain.memory.compare.compare_zero import main

if __name__ == "__main__":
    run_main(main)
