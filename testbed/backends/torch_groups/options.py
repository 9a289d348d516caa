"""Options of the backends over torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from testbed.base.errors import UsageError
from testbed.base.spec import BARE_OPTION


@dataclass(frozen=True)
class TorchOptions:
    """`gloo` and `nccl` have no options."""


@dataclass(frozen=True)
class PeerOptions:
    """Options of `peer`.

    Attributes:
        framework: whose exchange is measured.
        bucket_mib: size of a bucket, the framework's `bucket_cap_mb`.
    """

    framework: Literal["ddp"] = field(default="ddp", metadata=BARE_OPTION)
    bucket_mib: float = 25.0

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise UsageError(f"peer: bucket_mib is {self.bucket_mib:g}; expected a size above 0")
