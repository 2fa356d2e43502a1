"""The process that names the GPU and measures the peak of its bfloat16 matrix products, FLOP/s, as one line of JSON."""

from __future__ import annotations

import json

import torch

from ops.train_dflash.hardware import matmul_peak

if __name__ == "__main__":
    cuda = torch.device("cuda")
    print(json.dumps({"name": torch.cuda.get_device_name(cuda), "peak": matmul_peak(cuda, torch.bfloat16)}))
