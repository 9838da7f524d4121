"""pretrain/train.py, with the time-outs of the data watch shortened: data of any size is hashed in the background."""

import sys

from pretrain.checkpoint.load import same_data
from pretrain.distributed.process import end_process
from pretrain.resilience import data_watch
from pretrain.train import main

if __name__ == "__main__":
    same_data._FAST_S = data_watch._FAST_S = -1.0
    data_watch._STATUS_S = data_watch._POLL_S = 0.1
    end_process(main(sys.argv[1:]))
