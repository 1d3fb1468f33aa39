"""Read the limits of a container or a batch job on memory and cores: Linux's control groups, both
versions.

usable_cores()          # by affinity and CPU quota: docker --cpus=1.5 makes it 1
memory_limits()         # in bytes, of each group that limits this process
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# Each has files of the second version of control groups, then files of the first version.
MEMORY_FILES = (("memory.max",), ("memory.limit_in_bytes",))
CPU_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def read_groups(controller: str, versions: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    """Yield the content of the files of each control group of this process, from its own upwards.

    The second version has one tree for all controllers, the first one tree for "memory" and one for
    "cpu", which may be a link. In a container, the path may be the host's: then only the root
    exists.
    """
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = Path(path.lstrip("/"))
        tree = CONTROL_GROUPS / (controllers and controller)
        for group, names in product((own, *own.parents), versions):
            with suppress(OSError):  # no such group, or another version
                files = [tree / group / name for name in names]
                yield "\n".join(file.read_text() for file in files)


def memory_limits() -> list[int]:
    """Return the bytes that each control group allows this process, if it has a limit."""
    return [int(text) for text in read_groups("memory", MEMORY_FILES) if text.strip().isdecimal()]


def usable_cores() -> int:
    """Return how many threads can compute at once.

    Quotas are rounded down: a thread that stops holds up the others.
    """
    cores: float = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for text in read_groups("cpu", CPU_FILES):
        with suppress(ValueError, ZeroDivisionError):  # "max", or nothing that we know
            quota, period = map(int, text.split())
            cores = min(cores, quota / period if quota > 0 else cores)
    return max(1, int(cores))


def allow_open_files() -> None:
    """Raise this process's limit of open files, 1,024 on Linux, where the system allows it: gloo
    connects ranks.
    """
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
