"""Uploads to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def whole_name(name: str) -> str:
    """OWNER/NAME of a repository; who is logged in owns a bare NAME.

    Raises ValueError where nobody is, where the hub cannot be reached, and for a name that it cannot have.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    with one_line(
        name, "is there a network, and does `hf auth whoami` know you? `hf auth login` takes a token that may write"
    ):
        owner = HfApi().whoami()["name"]
        whole = name if "/" in name else f"{owner}/{name}"
        validate_repo_id(whole)
    return whole


def push(name: str, files: dict[str, Path | bytes], remedy: str) -> str:
    """Uploads files, by their names there, in one commit; returns the address. A new repository is private.

    Raises ValueError, which ends with the remedy.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = HfApi()
    with one_line(name, remedy):
        address = api.create_repo(name, private=True, exist_ok=True)
        additions = [CommitOperationAdd(path, content) for path, content in files.items()]
        api.create_commit(name, additions, commit_message="Exported by deskGPT")
    return str(address)


@contextmanager
def one_line(name: str, remedy: str) -> Iterator[None]:
    """The errors of the hub, of its HTTP client and of the network, which share no class, become a ValueError."""
    try:
        yield
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"push_to_hub={name}: {reason[:120]}; {remedy}") from None
