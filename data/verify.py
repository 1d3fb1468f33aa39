"""Verifies token files by the checksums in meta.json: a small data set before the run, a large one while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from data.meta_files import CHECKSUM, read_record
from data.splits import Split
from data.token_files import MappedFile, listed_with_masks

AT_ONCE = 512 << 20  # bytes that are verified before the run begins: in a second or so


class Verification:
    """Verifies the files of splits that meta.json lists, masks included.

    Raises ValueError if one is not what it says, OSError. Of a large data set, `check` raises that later. `state`
    says in a few words for the log what is verified.
    """

    def __init__(self, folder: Path, splits: Iterable[Split]) -> None:
        meta = read_record(folder)
        self._checksums = {name: entry["sha256"] for name, entry in listed_with_masks(meta).items()}
        files = [file for split in splits for file in split.files() if file.path.name in self._checksums]
        self._fault: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._verify, args=[files], name="checksums", daemon=True)
        self._thread.start()
        if not self._checksums:
            self.state = "no checksums (meta.json lists no files)" if meta else "no checksums (no meta.json)"
        elif sum(file.opened.st_size for file in files) <= AT_ONCE:
            self._thread.join()
            self.check()
            self.state = "checksums verified"
        else:
            self.state = "checksums are verified while it trains"
        if self._checksums and CHECKSUM not in meta:
            self.state += "; meta.json is of an older version and has no checksum itself"

    def check(self) -> None:
        """Raises ValueError if a file has turned out not to have its checksum, or OSError. Cheap: for each step."""
        if self._fault is not None:
            raise self._fault

    def close(self, print0: Callable[[str], None]) -> None:
        """Stops verifying, and prints if something was left to verify. Raises as check."""
        finished = not self._thread.is_alive()
        self._stop.set()
        self._thread.join()
        self.check()
        if not finished:
            print0("note: the run ended before the checksums of all its data were verified")

    def _verify(self, files: list[MappedFile]) -> None:
        try:
            for file in files:
                checksum = file.sha256(cancelled=self._stop.is_set)
                if checksum not in (None, self._checksums[file.path.name]):
                    raise ValueError(
                        f"{file.path}: its checksum is not the one in meta.json: the file is damaged or was changed; "
                        "prepare the data again"
                    )
        except Exception as e:  # raised by `check`
            self._fault = e
