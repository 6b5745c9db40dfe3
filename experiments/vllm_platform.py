"""A vLLM platform without a device, for `experiments.vllm_executor`. vLLM loads it from the entry point `vllm.platform_plugins`."""

import os
import shlex
from typing import Any

from vllm.platforms.interface import Platform, PlatformEnum

MEMORY = 1 << 40  # bytes of memory that vLLM sees at start; the executor reports the bytes available for the KV cache


def register() -> str | None:
    """Returns the name of the platform if CBATCH enables simulation; otherwise it would replace vLLM's CPU platform."""
    words = {word.lstrip("+") for word in shlex.split(os.environ.get("CBATCH", "").lower())}
    return f"{__name__}.NoDevice" if {"vllm.simulate=true", "vllm.simulate=on"} & words else None


class NoDevice(Platform):  # type: ignore[misc]
    """Implements the methods of `Platform` that vLLM calls before it has an executor."""

    _enum = PlatformEnum.OOT
    device_name = device_type = "cpu"
    device_control_env_var = "CBATCH_DEVICES"

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "simulated"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return MEMORY

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = 16

    @classmethod
    def import_kernels(cls) -> None: ...

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def get_attn_backend_cls(cls, *args: Any, **kwargs: Any) -> str:
        return "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None: ...

    @classmethod
    def manual_seed_all(cls, seed: int) -> None: ...
