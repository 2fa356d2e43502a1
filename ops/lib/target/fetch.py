"""Checkpoints and processors by name: a directory, or a model id to download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.constants import ENDPOINT as HF_ENDPOINT
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from dsl.errors import DataError
from ops.lib.data.proxies import proxies, proxy_of
from ops.lib.target.checkpoint_check import loading_mistakes, stored_mistakes
from ops.lib.target.checkpoint_files import CODE, CONFIGS, PROCESSOR, WEIGHTS
from ops.lib.target.quantised import FILES


def patterns(trust_remote_code: bool) -> tuple[str, ...]:
    """The patterns of a checkpoint's files to download; code only if trusted."""
    return (*CONFIGS, *WEIGHTS, *PROCESSOR, *(CODE if trust_remote_code else ()))


def find_checkpoint(name: str, revision: str | None, trust_remote_code: bool = False) -> Path:
    """The directory of a checkpoint; a model id is downloaded into Hugging Face's cache first.

    Raises DataError with all mistakes if it cannot be loaded, or needs its own code without trust.
    """
    directory = Path(name)
    if not directory.exists():
        if mistakes := stored_mistakes(fetch(name, revision, (*CONFIGS, *FILES))):
            raise DataError("\n".join(mistakes))  # before the weights are downloaded
        directory = fetch(name, revision, patterns(trust_remote_code))
    mistakes = loading_mistakes(str(directory), trust_remote_code)
    if mistakes:
        raise DataError("\n".join(mistakes))
    return directory


def find_processor(name: str, revision: str | None, trust_remote_code: bool = False) -> str:
    """The directory of a processor; a model id's files are downloaded. Raises DataError if it has none."""
    if Path(name).is_dir():
        return name
    return str(fetch(name, revision, (*CONFIGS, *PROCESSOR, *(CODE if trust_remote_code else ()))))


def fetch(model_id: str, revision: str | None, allow_patterns: Sequence[str]) -> Path:
    """The folder in Hugging Face's cache with these files of a model. Raises DataError if the download fails."""
    unusable = [proxy.mistake for proxy in proxies().values() if proxy.mistake]  # httpx opens all of them
    if unusable:
        raise DataError(f"{model_id} cannot be downloaded: {'; '.join(unusable)}")
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=[*allow_patterns]))
    except (httpx.HTTPError, HfHubHTTPError, OSError, ValueError) as error:
        named = model_id if revision is None else f"{model_id}@{revision}"
        raise DataError(
            f"{named} is neither a local directory nor a model that can be downloaded: {_why(error)}"
        ) from (error)


def _why(error: Exception) -> str:
    """A text on why a download failed, and what to do."""
    if isinstance(error, GatedRepoError):
        return "its page asks for agreement; agree there, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hub has no such model, or it is private; check owner and name, or `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return "the Hub has no such commit of it; take one from the model's page under Files and versions"
    if isinstance(error, (LocalEntryNotFoundError, httpx.TransportError)):
        proxy = proxy_of(HF_ENDPOINT)
        through = f" through the proxy {proxy}" if proxy else ""
        return (
            f"the Hub cannot be reached{through}, and Hugging Face's cache does not hold it; connect this machine "
            "(and unset HF_HUB_OFFLINE), or copy the model's directory here and name that"
        )
    return str(error)
