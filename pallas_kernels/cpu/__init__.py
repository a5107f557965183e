"""Kernels for the CPU in C++, called through XLA's foreign function interface; built at first use."""

from pallas_kernels.cpu.attention import attend_qkv, paged_attention, write_kv
from pallas_kernels.cpu.build import load, loaded
from pallas_kernels.cpu.quantized_matmul import (
    Gate,
    Layout,
    Norm,
    PackedWeight,
    pack,
    quantized_matmul,
    quantized_rows,
    unpack,
)

__all__ = [
    "Gate",
    "Layout",
    "Norm",
    "PackedWeight",
    "attend_qkv",
    "load",
    "loaded",
    "pack",
    "paged_attention",
    "quantized_matmul",
    "quantized_rows",
    "unpack",
    "write_kv",
]
