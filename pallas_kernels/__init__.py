"""Kernels of an inference step: one op, one signature, one reference, any number of implementations in a registry.

Importable alone; knows nothing of the engine that uses it.
"""

from pallas_kernels import attention
from pallas_kernels.registry import Choice, Kernel, explain, names, register, select

__all__ = ["Choice", "Kernel", "attention", "explain", "names", "register", "select"]
