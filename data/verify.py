"""Verifies token files by the checksums in meta.json, once per content: a file that stays the same is not read again.

What was verified is remembered in `.checked.json` beside the files; in a folder that cannot be written, each run
verifies it again. A small data set is verified before the run begins, a large one in a thread while it trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.meta_files import CHECKSUM
from data.splits import Split
from data.token_files import OpenFile, listed_with_masks, read_record
from deskgpt.system import cache

REMEMBERED = ".checked.json"
AT_ONCE = 512 << 20  # bytes that are verified before the run begins: in a second or so
# A file changed as recently as this is not remembered: a change within the file system's tick (2 s on FAT) would be
# missed, as it leaves size and time alike.
RECENT_S = 2.0


class Verification:
    """Verifies the files of splits that meta.json lists, masks included.

    Raises ValueError where one is not what it says, OSError. Of a large data set, `check` raises that later. `state`
    says in a few words for the log what is verified.
    """

    def __init__(self, folder: Path, splits: Iterable[Split]) -> None:
        self._memory = folder / REMEMBERED
        self._fault: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

        meta = read_record(folder)
        listed = listed_with_masks(meta)
        files = [file for split in splits for file in split.files()]
        self._checksums = {name: entry["sha256"] for name, entry in listed.items()}
        self._known = cache.read_file(self._memory)
        to_do = [file for file in files if file.path.name in listed and not self._is_known(file)]
        n_bytes = sum(file.facts.size for file in to_do)

        if not listed:
            there = (folder / "meta.json").exists()
            self.state = "no checksums (meta.json lists no files)" if there else "no checksums (no meta.json)"
        elif not to_do:
            self.state = "checksums verified before"
        elif n_bytes <= AT_ONCE:
            self._verify(to_do)
            self.check()
            self.state = "checksums verified"
        else:
            self._thread = threading.Thread(target=self._verify, args=[to_do], name="checksums", daemon=True)
            self._thread.start()
            self.state = "checksums are verified while it trains"
        if listed and CHECKSUM not in meta:
            self.state += "; meta.json is of an older version and has no checksum itself"
        unlisted = [file.path.name for file in files if listed and file.path.name not in listed]
        if unlisted:
            more = f" and {len(unlisted) - 1} more" if unlisted[1:] else ""
            self.state += f"; meta.json does not list {unlisted[0]}{more}"

    def check(self) -> None:
        """Raises ValueError where a file has turned out not to have its checksum, or OSError. Cheap: for each step."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> bool:
        """Stops verifying. Returns whether it was finished; raises as check."""
        finished = self._thread is None or not self._thread.is_alive()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.check()
        return finished

    def _verify(self, files: list[OpenFile]) -> None:
        found: dict[str, Any] = {}
        try:
            for file in files:
                if self._stop.is_set():
                    break
                checksum = file.sha256(cancelled=self._stop.is_set)
                if checksum is None:
                    break
                if checksum != self._checksums[file.path.name]:
                    raise ValueError(
                        f"{file.path}: its checksum is not the one in meta.json: the file is damaged or was changed; "
                        "prepare the data again"
                    )
                last_ns = max(file.facts.written_ns, file.facts.changed_ns)
                settled = time.time() - last_ns / 1e9 > RECENT_S
                if settled and file.current_facts() == file.facts:
                    found[file.path.name] = self._entry(file)
        except Exception as e:  # may be in a thread of its own: raised by `check`
            self._fault = e
        if found:
            cache.keep_in_file(self._memory, found)

    def _is_known(self, file: OpenFile) -> bool:
        return self._known.get(file.path.name) == self._entry(file)

    def _entry(self, file: OpenFile) -> dict[str, Any]:
        """What is remembered of a file that has its checksum."""
        return file.facts._asdict() | {"sha256": self._checksums[file.path.name]}
