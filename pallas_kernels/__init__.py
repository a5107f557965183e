"""Kernels of an inference step: one op, one signature, one reference, any number of implementations in a registry.

Importable alone; knows nothing of the engine that uses it.
"""

from pallas_kernels import attention
from pallas_kernels.cpu import kernels as _cpu_kernels
from pallas_kernels.registry import Choice, Kernel, explain, find, names, register, select

_ = _cpu_kernels  # imported for what it registers

__all__ = ["Choice", "Kernel", "attention", "explain", "find", "names", "register", "select"]
