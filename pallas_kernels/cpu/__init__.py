"""Kernels for the CPU in C++, called through XLA's foreign function interface; built at first use."""

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
    "load",
    "loaded",
    "pack",
    "quantized_matmul",
    "quantized_rows",
    "unpack",
]
