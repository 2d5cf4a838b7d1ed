"""Downloads a checkpoint from the Hugging Face hub."""

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
    """Return the folder of a repository's files, downloading those that are not in the cache.

    `wanted` selects from the names of all files. Files are downloaded one after another, so Ctrl-C stops at
    once, and the next call skips the complete ones. Without a network, the cached files are used.
    `download_dir` None is Hugging Face's cache. Raises CheckpointError, and CapacityError on a full disk.
    """
    from huggingface_hub import HfApi, hf_hub_download  # imported here: it takes 0.2 s
    from huggingface_hub.errors import HTTPError

    names: list[str] | None = None
    try:
        names = [
            file.rfilename for file in HfApi().model_info(repo, revision=revision).siblings or ()
        ]
        # The first download records the branch or tag in the cache. The others use the commit, so that
        # all files belong to the same one.
        config = hf_hub_download(repo, "config.json", revision=revision, cache_dir=download_dir)
        folder = Path(config).parent
        for name in wanted(names):
            hf_hub_download(repo, name, revision=folder.name, cache_dir=download_dir)
    except KeyboardInterrupt:
        logger.warning(
            "download of %s was interrupted; run the same command to resume it",
            repo,
        )
        raise
    # hf_xet raises RuntimeError.
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        cached = (
            _cached(repo, revision, download_dir) if names is None and _is_network(error) else None
        )
        if cached is None:
            raise _explain(error, repo, revision, download_dir) from error
        logger.warning("cannot reach the Hugging Face hub; using the cached files of %s", repo)
        return cached
    return folder


def _cached(repo: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of a repository in the cache, or None. Uses no network."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, "config.json", cache_dir=download_dir, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def _is_network(error: Exception) -> bool:
    """Return whether the hub cannot be reached or offline mode is on."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    return isinstance(error, HTTPError | OfflineModeIsEnabled | ConnectionError | TimeoutError)


def _explain(
    error: Exception, repo: str, revision: str | None, download_dir: str | None
) -> Exception:
    """Return an error with a clear message."""
    from huggingface_hub import errors

    at = f"{repo}@{revision}" if revision else repo
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(
        error
    ):
        folder = Path(download_dir or getattr(error, "filename", None) or Path.home())
        free = shutil.disk_usage(folder if folder.exists() else Path.home()).free
        return CapacityError(
            f"no space left for {repo}: {free / 1e9:.1f} GB free at {folder}. Free some space, or use "
            "another disk with --download-dir. Complete files are kept."
        )
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{repo!r} is neither a directory nor a repo id such as owner/name")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{repo} is gated: accept its terms on its page, then set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"no directory and no hub repo {repo!r}; if the repo is private, set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {revision!r}; --revision is a branch, tag or commit"
        )
    if _is_network(error) and _cached(repo, revision, download_dir) is not None:
        return CheckpointError(
            f"lost the connection while downloading {at}; run the same command to continue"
        )
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_network(error):
        return CheckpointError(
            f"{at} is not in the cache and the hub cannot be reached; check the network, HF_HUB_OFFLINE "
            "and HF_ENDPOINT, or give the path of a local copy"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return CheckpointError(f"{at} has no config.json")
    return CheckpointError(f"cannot download {at}: {' '.join(str(error).split())}")
