"""What goes to a GPU goes by way of pinned memory: from any other the host would wait for the copy."""

import pytest
import torch

from ops.lib.kernels.device import to_device


class PinnedError(Exception):
    """The error of a stand-in for `pin_memory`, which works only with a GPU."""


def test_what_goes_to_a_gpu_is_pinned_first_and_what_goes_elsewhere_is_not(monkeypatch):
    def pin_memory(tensor):
        raise PinnedError

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    with pytest.raises(PinnedError):
        to_device(torch.ones(2), torch.device("cuda"))
    assert "meta" == to_device(torch.ones(2), torch.device("meta")).device.type
    host = torch.ones(2)
    assert to_device(host, torch.device("cpu")) is host
