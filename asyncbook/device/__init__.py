"""The only package of the core that knows torch, and only where a caller passes a tensor or asks for one.

Importing it makes the operators of `operators.py`. `api.py` says what a book asks of a device; `cuda.py` is one,
`fake.py` another that tests put in its place. `link.py` connects a book with a device, `columns.py` shows a frame as
tensors.
"""

from __future__ import annotations

from asyncbook.device.operators import DTYPES, INDEX_DTYPES, host_array, host_values

__all__ = ["DTYPES", "INDEX_DTYPES", "host_array", "host_values"]
