"""Parameter servers over ZeroMQ: colocated or dedicated, bulk synchronous or not.

Nothing here imports ZeroMQ or torch, so that options can be read and availability asked without.
"""

from __future__ import annotations

import importlib.util
from typing import cast

from testbed.backends.protocol import Backend, BackendKind, Group
from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.placement import busiest_link_bytes

__all__ = ["ZMQ_PS", "ZmqPsOptions", "busiest_link_bytes"]


def _probe() -> tuple[str, str] | None:
    if importlib.util.find_spec("zmq") is None:
        return ("pyzmq is not installed", "run: pip install pyzmq")
    return None


def _open(group: Group, options: object) -> Backend:
    from testbed.backends.zmq_ps.backend import open_backend

    return open_backend(group, options)


def _serve(group: Group, options: object) -> None:
    from testbed.backends.zmq_ps.backend import serve

    serve(group, options)


ZMQ_PS = BackendKind(
    name="zmq-ps",
    summary="parameter servers over ZeroMQ: colocated or dedicated; bsp, ssp or async",
    open=_open,
    options=ZmqPsOptions,
    probe=_probe,
    num_servers=lambda options: cast(ZmqPsOptions, options).num_dedicated,
    serve=_serve,
    # Of the default options, one server beside every worker; see placement.busiest_link_bytes.
    bus_factor=lambda num_workers: busiest_link_bytes(1.0, num_workers, ZmqPsOptions()),
    consistency=lambda options: cast(ZmqPsOptions, options).consistency,
    max_channels=lambda options: 8,
)
