"""Writes a sharded run's checkpoint, a folder, as one file, which nanoGPT reads.

python -m deskgpt.checkpoint convert out/ckpt-00001000 ckpt.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

from deskgpt.checkpoint import ckpt_file
from deskgpt.checkpoint.store import FORMAT, content_of, load, whole
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import check_unused


def convert(source: str, target: str) -> None:
    """Writes the checkpoint `source`, as load takes it, as the file `target`.

    Raises ValueError or OSError; a target that exists is left alone.
    """
    path = Path(target)
    check_unused(path)
    saved = whole(load(source, print))
    ckpt_file.write(content_of(saved) | {"format": FORMAT}, path)
    print(f"{target}: step {saved.iter_num}, {len(saved.model)} weights")


if __name__ == "__main__":
    with one_line_errors("the machine's memory must hold the checkpoint"):
        if len(sys.argv) != 4 or sys.argv[1] != "convert":
            raise ValueError("usage: python -m deskgpt.checkpoint convert SOURCE TARGET")
        convert(sys.argv[2], sys.argv[3])
