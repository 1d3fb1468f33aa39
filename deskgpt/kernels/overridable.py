"""Where model.py allows a faster replacement for what it defines.

A function under `overridable` computes what is written there, unless something replaces it: within
`replacing({"attention": f})`, each call attention(*args) becomes f(attention, *args). A replacement that cannot compute
what it is given returns attention(*args). verify.py finds out which ones are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Replacements = Mapping[str, Callable[..., Any]]  # by the name of the function that they replace

_in_use: Replacements = {}  # set by replacing; of all threads, since autograd recomputes blocks in its own


def overridable(reference: Function) -> Function:
    """Lets something replace a function or method of model.py, under its name: attention, GPT.loss."""
    name = reference.__qualname__

    @functools.wraps(reference)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        replacement = _in_use.get(name)
        return reference(*args, **kwargs) if replacement is None else replacement(reference, *args, **kwargs)

    return dispatch  # type: ignore[return-value]


@contextmanager
def replacing(replacements: Replacements) -> Iterator[None]:
    """Within the block these replace what model.py defines, and nothing else does."""
    global _in_use
    before = _in_use
    _in_use = replacements
    try:
        yield
    finally:
        _in_use = before
