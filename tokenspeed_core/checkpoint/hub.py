"""Downloading a checkpoint from a hub that speaks Hugging Face's protocol, with errors a person can act on."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenspeed_core.errors import CapacityError, CheckpointError

logger = logging.getLogger("tokenspeed.hub")


def download(
    repo: str,
    revision: str | None,
    download_dir: str | None,
    wanted: Callable[[Sequence[str]], Sequence[str]],
) -> Path:
    """Return the folder of a repository's wanted files, downloading those that are not in the cache.

    `wanted` chooses among the file names of the repository. Files are fetched one after another, so that
    Ctrl-C ends at once; those that are complete stay, and the next call goes on after them. Without a
    network the cache is used as it is. `download_dir` None means Hugging Face's own cache. Raises
    CheckpointError, and CapacityError on a full disk.
    """
    from huggingface_hub import HfApi, hf_hub_download  # imported here: it takes 0.2 s
    from huggingface_hub.errors import HTTPError

    names: list[str] | None = None
    try:
        names = [
            file.rfilename for file in HfApi().model_info(repo, revision=revision).siblings or ()
        ]
        # By branch or tag once, which is noted in the cache; then by commit, so that all files agree.
        config = hf_hub_download(repo, "config.json", revision=revision, cache_dir=download_dir)
        folder = Path(config).parent
        for name in wanted(names):
            hf_hub_download(repo, name, revision=folder.name, cache_dir=download_dir)
    except KeyboardInterrupt:
        logger.warning(
            "download of %s stopped; the same command goes on after the files that are complete",
            repo,
        )
        raise
    except (
        HTTPError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the last is what hf_xet raises
        cached = (
            _cached(repo, revision, download_dir) if names is None and _is_network(error) else None
        )
        if cached is None:
            raise _explained(error, repo, revision, download_dir) from error
        logger.warning(
            "the hub cannot be reached; using the files of %s that are in the cache", repo
        )
        return cached
    return folder


def _cached(repo: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a repository in the cache, or None. Asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", cache_dir=download_dir, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _is_network(error: Exception) -> bool:
    """Whether an error means that the hub cannot be reached, or must not be asked."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled | ConnectionError | TimeoutError)


def _explained(
    error: Exception, repo: str, revision: str | None, download_dir: str | None
) -> Exception:
    """Return the error that says in one line what to do."""
    from huggingface_hub import errors

    at = f"{repo}@{revision}" if revision else repo
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(
        error
    ):
        folder = Path(download_dir or getattr(error, "filename", None) or Path.home())
        free = shutil.disk_usage(folder if folder.exists() else Path.home()).free
        return CapacityError(
            f"no space left for {repo}: {free / 1e9:.1f} GB free at {folder}; free some, or give "
            "--download-dir on another disk; complete files are kept"
        )
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(
            f"{repo!r} is neither a directory nor a repo id of the form owner/name"
        )
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{repo} needs its owner's permission: accept its terms on its page, then set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"there is no directory and no repo {repo!r} on the hub (or it is private: set "
            "HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {revision!r}; --revision is a branch, tag or commit"
        )
    if _is_network(error) and _cached(repo, revision, download_dir) is not None:
        return CheckpointError(
            f"the connection was lost while {at} was downloaded; the same command goes on after "
            "the files that are complete"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_network(error):
        return CheckpointError(
            f"{at} is not in the cache, and the hub cannot be reached; check the network (or "
            "HF_HUB_OFFLINE and HF_ENDPOINT), or give the path of a local copy"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return CheckpointError(
            f"{at} has no config.json, so it is no model that can be served from here"
        )
    return CheckpointError(f"{at} cannot be downloaded: {' '.join(str(error).split())}")
