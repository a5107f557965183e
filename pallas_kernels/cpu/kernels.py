"""Enters the CPU kernels into the registry."""

from __future__ import annotations

from pallas_kernels.cpu import attention
from pallas_kernels.cpu.build import loaded
from pallas_kernels.registry import Kernel, register


def _why_not(*, platform: str, dtype: str, kv_dtype: str, head_dim: int, page_size: int) -> str | None:
    if platform != "cpu":
        return "runs on a CPU only"
    if not loaded():
        return "the library is not built or not loaded"
    return attention.why_not(head_dim=head_dim, page_size=page_size, kv_dtype=kv_dtype, dtype=dtype)


for op, fn in (
    ("paged_attention", attention.paged_attention),
    ("write_kv", attention.write_kv),
    ("attend_qkv", attention.attend_qkv),
):
    register(Kernel(op, "cpu", fn, 30, _why_not))
