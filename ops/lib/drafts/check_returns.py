"""Whether what an algorithm's functions return has the form that their callers rely on.

Only types, shapes and dtypes are looked at, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dsl.errors import ConfigError
from ops.lib.drafts.algorithms import Algorithm, file_of
from ops.lib.drafts.decoding.proposal import Proposal
from ops.lib.drafts.losses.loss_request import Outcome


def check_outcome(algorithm: Algorithm, outcome: Outcome, slots: int, metrics: tuple[str, ...]) -> None:
    """Check the result of an algorithm's block_losses for so many slots. Raises ConfigError.

    metrics: the names that the algorithm's config gives.
    """
    mistakes = _of_type(outcome, Outcome)
    if not mistakes:
        shape = (slots,)
        mistakes += _unlike("losses_W", outcome.losses_W, shape, None)
        mistakes += _unlike("correct_W", outcome.correct_W, shape, torch.bool)
        mistakes += [] if outcome.added_W is None else _unlike("added_W", outcome.added_W, shape, None)
        mistakes += [] if outcome.total is None else _unlike("total", outcome.total, (), None)
        if len(outcome.found) != len(metrics):
            expected = f"{len(metrics)}, the metrics of config.py" + (f" ({', '.join(metrics)})" if metrics else "")
            mistakes.append(f"found: {len(outcome.found)} tensors; expected {expected}")
        for name, values_W in zip(metrics, outcome.found, strict=False):
            mistakes += _unlike(f"found, {name}", values_W, shape, None)
    _raise(algorithm, "loss", "block_losses", mistakes)


def check_proposal(algorithm: Algorithm, proposal: Proposal, rows: int, proposals: int) -> None:
    """Check the result of an algorithm's propose for a batch of `rows` rows. Raises ConfigError with all mistakes."""
    mistakes = _of_type(proposal, Proposal)
    if not mistakes:
        mistakes += _unlike("tokens_BD", proposal.tokens_BD, (rows, proposals), torch.int64)
        if proposal.confidence_BD is not None:
            mistakes += _unlike("confidence_BD", proposal.confidence_BD, (rows, proposals), None)
    _raise(algorithm, "model", "propose", mistakes)


def check_entered(algorithm: Algorithm, name: str, entered: object, shape: tuple[int, ...]) -> None:
    """Check the result of `enter` of a module around a sublayer. Raises ConfigError. shape: of its normed input."""
    if not isinstance(entered, tuple) or len(entered) != 2:
        mistakes = [f"a value of type {type(entered).__name__}; expected the sublayer's input and what leave needs"]
    else:
        mistakes = _unlike("the sublayer's input", entered[0], shape, None)
    _raise(algorithm, "model", f'enter of "{name}"', mistakes)


def check_left(algorithm: Algorithm, name: str, left: object, shape: tuple[int, ...]) -> None:
    """Check the result of `leave` of a module around a sublayer. Raises ConfigError."""
    _raise(algorithm, "model", f'leave of "{name}"', _unlike("what is added", left, shape, None))


def _of_type(returned: object, wanted: type) -> list[str]:
    if isinstance(returned, wanted):
        return []
    return [f"a value of type {type(returned).__name__}; expected {wanted.__module__}.{wanted.__name__}"]


def _unlike(name: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype | None) -> list[str]:
    """Mistakes of a returned tensor: another type, shape or dtype than expected. dtype: None for any float type."""
    if not isinstance(tensor, Tensor):
        return [f"{name}: a value of type {type(tensor).__name__}; expected a tensor"]
    if tensor.shape == shape and (tensor.dtype == dtype or (dtype is None and tensor.dtype.is_floating_point)):
        return []
    wanted = "floating-point numbers" if dtype is None else _named(dtype)
    return [f"{name}: {_named(tensor.dtype)} {[*tensor.shape]}; expected {wanted} {[*shape]}"]


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _raise(algorithm: Algorithm, file: str, function: str, mistakes: Iterable[str]) -> None:
    if lines := [f"{file_of(algorithm, file)}: {function} returned {mistake}" for mistake in mistakes]:
        raise ConfigError(*lines)
