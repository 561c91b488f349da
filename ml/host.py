"""The host's memory, as reported by the operating system."""

from __future__ import annotations

import os


def host_memory() -> tuple[int | None, int | None]:
    """(available, total) bytes of this machine; None if the system does not report them."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None, None
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024, total
    except OSError:
        pass
    try:
        return page * os.sysconf("SC_AVPHYS_PAGES"), total
    except (AttributeError, ValueError, OSError):
        return None, total
