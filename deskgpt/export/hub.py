"""Uploads to the Hugging Face hub, and its errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGIN = "is there a network, and does `hf auth whoami` know you? `hf auth login` takes a token that may write"


def full_name(name: str) -> str:
    """Return OWNER/NAME of a repository; a bare NAME belongs to who is logged in. Raises ValueError if it cannot be."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    with one_line(f"push_to_hub={name}", LOGIN):
        owner = HfApi().whoami()["name"]
        full = name if "/" in name else f"{owner}/{name}"
        validate_repo_id(full)
    return full


def push(name: str, files: dict[str, Path | bytes], remedy: str) -> str:
    """Upload files, by their names there, in one commit; return the address. A new repository is private.

    Raises ValueError, which ends with the remedy.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with one_line(f"push_to_hub={name}", remedy):
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        HfApi().create_commit(name, additions, commit_message="Exported by deskGPT")
    return str(address)


@contextmanager
def one_line(setting: str, remedy: str) -> Iterator[None]:
    """Turn errors of the hub, of its HTTP client and of the network, which share no class, into a ValueError."""
    try:
        yield
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"{setting}: {reason[:160]}; {remedy}") from None
