"""Where model.py asks for a faster form of what it defines.

A function under `may_be_faster` computes what is written there, unless a form stands in for it: within
`using({"attention": form})`, each call attention(*args) becomes form(attention, *args). A form that does not know how
to compute what it is given returns attention(*args). Which forms are right, held.py finds out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Plain = TypeVar("Plain", bound=Callable[..., Any])
Forms = Mapping[str, Callable[..., Any]]  # by the name of the function that they stand in for

_in_use: Forms = {}  # set by using; of all threads, since autograd computes checkpointed blocks again in its own


def overridable(plain: Plain) -> Plain:
    """A function or method of model.py that a form may stand in for, under its name: attention, GPT.loss."""
    name = plain.__qualname__

    @functools.wraps(plain)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        form = _in_use.get(name)
        return plain(*args, **kwargs) if form is None else form(plain, *args, **kwargs)

    return dispatch  # type: ignore[return-value]


@contextmanager
def replacing(forms: Forms) -> Iterator[None]:
    """Within the block these forms stand in for what model.py defines, and no others."""
    global _in_use
    before = _in_use
    _in_use = forms
    try:
        yield
    finally:
        _in_use = before
