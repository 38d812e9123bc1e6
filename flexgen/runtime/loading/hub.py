"""A model by its name on the Hugging Face Hub: its cache first, then a download of safetensors and tokenizer files alone."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from flexgen.contract.json_files import read_object, shown
from flexgen.errors import FlexgenError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*"]
"""Folders hold the same weights in other formats, or other parts; so do files of the second name."""

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")


class HubError(FlexgenError):
    """A model that is neither a directory here nor to be had from the Hub."""


def fetched(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
) -> Path:
    """The directory of a model: itself, or that of a name such as "Qwen/Qwen3-0.6B", fetched where the cache lacks it.

    revision      a branch, tag or commit; "main" where none is given
    download_dir  another cache than Hugging Face's
    token         for gated models; None: the one of `hf auth login` or HF_TOKEN
    Downloads resume where they broke off. With HF_HUB_OFFLINE=1 only the cache is asked. Raises HubError.
    """
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision={shown(revision)} is of a model on the Hub, and {path} is a directory here")
        return path
    name = os.fspath(model)
    if not _NAME.fullmatch(name):
        return path  # reading its config says what is missing
    wanted: dict[str, Any] = {
        "repo_id": name, "revision": revision, "cache_dir": download_dir, "token": token, "allow_patterns": _WANTED,
        "ignore_patterns": _UNWANTED,
    }  # fmt: skip
    cached = _cached(wanted)
    if cached is not None and _has_weights(cached) and any((cached / file).exists() for file in _TOKENIZERS):
        return cached
    return _download(wanted, cached)


def _cached(wanted: dict[str, Any]) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(**wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _download(wanted: dict[str, Any], cached: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = wanted["repo_id"]
    try:
        return Path(snapshot_download(**wanted))
    except GatedRepoError:
        raise HubError(f"{name} is gated: accept its terms on its page, then give a token: LLM(hf_token=...), or HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{name} is neither a directory here nor a model on the Hub; a private one needs a token: LLM(hf_token=...), or HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name} has no revision {shown(wanted['revision'])}") from None
    except (HTTPError, OSError) as error:
        if cached is not None and _has_weights(cached):
            log.warning("%s is taken from the cache, which may lack files, since the Hub did not answer: %s", name, error)
            return cached
        held = "a part of it" if cached else "nothing of it"
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise HubError(
            f"{name} is no directory here, the cache holds {held}, and the Hub did not give it ({said}). "
            f"Give a directory, or fetch it where there is a network: `hf download {name}`"
        ) from None


def _has_weights(directory: Path) -> bool:
    """Whether a directory holds a config and every file of weights that its index lists."""
    index = directory / "model.safetensors.index.json"
    if not (directory / "config.json").exists():
        return False
    if index.exists():
        return all((directory / file).exists() for file in set(read_object(index).get("weight_map", {}).values()))
    return any(directory.glob("*.safetensors"))
