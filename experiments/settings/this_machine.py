"""The processors of this machine. Importing this module loads neither torch nor CUDA."""

import ctypes
import os
import platform
import re
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """Returns the processor's own name and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return f"{found.group(1) if found else platform.machine()}, {cores} cores"


def memory_bytes() -> float:
    """Returns the size of this machine's memory."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def card_name() -> str:
    """Returns the current GPU's name and the first digits of its number, which tell cards of a kind apart. Loads torch."""
    import torch

    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name} {str(properties.uuid)[:8]}"


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use. Asks the driver: importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
