"""Verifies token files by the checksums in meta.json, once per content: a file that stays the same is not read again.

What was verified is kept in `.checked.json` beside the files; in a folder that cannot be written, each run verifies it
again. A small data set is verified before the run begins, a large one in a thread while it trains.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data.meta_files import CHECKSUM
from data.splits import Split
from data.token_files import MappedFile, listed_with_masks, read_record
from deskgpt.system import cache

CHECKED = ".checked.json"
AT_ONCE = 512 << 20  # bytes that are verified before the run begins: in a second or so
# A file changed as recently as this is not kept as verified: a change within the file system's tick (2 s on FAT) would
# be missed, as it leaves size and time alike.
RECENT_S = 2.0


class Verification:
    """Verifies the files of splits that meta.json lists, masks included.

    Raises ValueError if one is not what it says, OSError. Of a large data set, `check` raises that later. `state`
    says in a few words for the log what is verified.
    """

    def __init__(self, folder: Path, splits: Iterable[Split]) -> None:
        self._path = folder / CHECKED
        self._fault: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

        meta = read_record(folder)
        self._checksums = {name: entry["sha256"] for name, entry in listed_with_masks(meta).items()}
        known = cache.read_file(self._path)
        files = [file for split in splits for file in split.files() if file.path.name in self._checksums]
        to_do = [file for file in files if known.get(file.path.name) != self._entry(file, file.opened)]

        if not self._checksums:
            self.state = "no checksums (meta.json lists no files)" if meta else "no checksums (no meta.json)"
        elif not to_do:
            self.state = "checksums verified before"
        elif sum(file.opened.st_size for file in to_do) <= AT_ONCE:
            self._verify(to_do)
            self.check()
            self.state = "checksums verified"
        else:
            self._thread = threading.Thread(target=self._verify, args=[to_do], name="checksums", daemon=True)
            self._thread.start()
            self.state = "checksums are verified while it trains"
        if self._checksums and CHECKSUM not in meta:
            self.state += "; meta.json is of an older version and has no checksum itself"

    def check(self) -> None:
        """Raises ValueError if a file has turned out not to have its checksum, or OSError. Cheap: for each step."""
        if self._fault is not None:
            raise self._fault

    def close(self, print0: Callable[[str], None]) -> None:
        """Stops verifying, and prints if something was left to verify. Raises as check."""
        finished = self._thread is None or not self._thread.is_alive()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.check()
        if not finished:
            print0("note: the run ended before the checksums of all its data were verified")

    def _verify(self, files: list[MappedFile]) -> None:
        found: dict[str, Any] = {}
        try:
            for file in files:
                checksum = file.sha256(cancelled=self._stop.is_set)
                if self._stop.is_set():
                    break
                status = file.status()
                if checksum is None or status is None:  # another file has replaced it
                    continue
                if checksum != self._checksums[file.path.name]:
                    raise ValueError(
                        f"{file.path}: its checksum is not the one in meta.json: the file is damaged or was changed; "
                        "prepare the data again"
                    )
                settled = time.time() - max(status.st_mtime, status.st_ctime) > RECENT_S
                if settled and self._entry(file, status) == self._entry(file, file.opened):
                    found[file.path.name] = self._entry(file, status)
        except Exception as e:  # may be in a thread of its own: raised by `check`
            self._fault = e
        if found:
            cache.keep_in_file(self._path, found)

    def _entry(self, file: MappedFile, status: os.stat_result) -> dict[str, Any]:
        """What is kept of a file that has its checksum. Programs can set the time of writing, but not of changing."""
        return {
            "size": status.st_size,
            "written_ns": status.st_mtime_ns,
            "changed_ns": status.st_ctime_ns,
            "sha256": self._checksums[file.path.name],
        }
