"""The dtypes that tensors may have on their way between ranks: the one table of them.

Torch's own are found by name (`getattr(torch, name)`), so that nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Dtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8"]

# Bytes of an element. A dtype's place in the table is its number on the wire: new ones go to the
# end.
ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
}
