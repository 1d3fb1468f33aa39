"""What a container or a batch job allows of a machine's memory and cores: Linux's control groups, both versions.

usable_cores()          # by affinity and CPU quota: docker --cpus=1.5 makes it 1
memory_limits()         # [(limit, used)] in bytes, one for each group that limits this process
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, from its own upwards.

    The second version has one tree for all controllers, the first one tree for "memory" and one for "cpu". In a
    container, the path may be the host's: then only the root exists.
    """
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            own = Path(path.lstrip("/"))
            for group in (own, *own.parents):
                yield CONTROL_GROUPS / controllers / group


def memory_limits() -> list[tuple[int, int]]:
    """Return (limit, use without cached files) in bytes of each control group that limits this process."""
    found = []
    for folder in control_groups("memory"):
        names = ("memory.max", "memory.current")
        if not (folder / names[0]).exists():
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
            limit = int((folder / names[0]).read_text())
            used = int((folder / names[1]).read_text())
            cached = re.search(r"^inactive_file (\d+)", (folder / "memory.stat").read_text(), re.M)
            found.append((limit, used - int(cached[1] if cached else 0)))
    return found


def cpu_quotas() -> list[float]:
    """Return how many cores' time each control group allows, for those that limit it."""
    found = []
    for folder in control_groups("cpu"):
        with suppress(OSError, ValueError):  # "max" is no number
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(quota) > 0:  # -1: no limit
                found.append(int(quota) / int(period))
    return found


def usable_cores() -> int:
    """Return how many threads can compute at once. Quotas are rounded down: a thread that stops holds up the others."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *cpu_quotas()])))
