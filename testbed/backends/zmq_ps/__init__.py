"""Parameter servers over ZeroMQ: colocated or dedicated, bulk synchronous or not.

Nothing here imports ZeroMQ or torch, so that options can be read and availability asked without.
"""

from __future__ import annotations

from testbed.backends.protocol import Backend, Group
from testbed.backends.zmq_ps.options import ZmqPsOptions
from testbed.backends.zmq_ps.placement import busiest_link, busiest_link_bytes
from testbed.base.axes import COMPRESSORS, BackendFacts
from testbed.base.config import RunConfig
from testbed.base.parts import Part, installed

__all__ = ["ZMQ_PS", "ZmqPsOptions", "busiest_link_bytes"]


def _open(group: Group, options: object) -> Backend:
    from testbed.backends.zmq_ps.backend import open_backend

    return open_backend(group, options)


def _serve(group: Group, options: object) -> None:
    from testbed.backends.zmq_ps.backend import serve

    serve(group, options)


def _algorithm(options: ZmqPsOptions) -> str:
    """As predictions know it.

    Example:
        >>> _algorithm(ZmqPsOptions(servers="dedicated:2")), _algorithm(ZmqPsOptions())
        ('server:servers=2,placement=dedicated', 'server')
    """
    where, _, count = options.servers.partition(":")
    words = [f"servers={count}"] if count else []
    words += ["placement=dedicated"] if where == "dedicated" else []
    return "server" + (":" + ",".join(words) if words else "")


def _refuses(options: ZmqPsOptions, config: RunConfig) -> str | None:
    compressed = not COMPRESSORS.is_default(config)
    saves = config.checkpoint or config.resume_from
    if options.update_on_server and config.clip_norm is not None:
        return (
            "--clip-norm needs the whole mean gradient in one place, but with update=server it "
            "exists on the servers in slices; use update=worker"
        )
    if options.update_on_server and saves:
        return (
            "--checkpoint and --resume-from need the optimizer's state, but with update=server it "
            "is on the servers; use update=worker"
        )
    if options.update_on_server and compressed:
        return (
            f"compressor {config.compressor!r} delivers means to the workers, but with "
            "update=server the optimizer is on the servers and takes gradients as they are; use "
            "update=worker"
        )
    if compressed and saves and _encodes_again(options, config):
        return (
            f"with {config.backend!r} servers keep what they did not send back of "
            f"{config.compressor!r}, which no checkpoint holds; write zmq-ps:repack=0, or leave "
            "out --checkpoint and --resume-from"
        )
    return None


def _encodes_again(options: ZmqPsOptions, config: RunConfig) -> bool:
    links = COMPRESSORS.resolve(config.compressor).links
    if options.repack is None:
        return any(link.facts.requantised for link in links)
    merging = [part for link in links for part in link.facts.merged_by.values()]
    return options.repack and any(hasattr(part, "encode") for part in merging)


ZMQ_PS = Part(
    name="zmq-ps",
    summary="parameter servers over ZeroMQ: colocated or dedicated; bsp, ssp or async",
    build=_open,
    options=ZmqPsOptions,
    facts=lambda options: BackendFacts(
        num_servers=options.num_dedicated,
        serve=_serve,
        consistency=options.consistency,
        updates=options.update_on_server,
        max_channels=8,
        algorithm=_algorithm(options),
        bus_factor=lambda num_workers: busiest_link_bytes(1.0, num_workers, options),
        busiest_link=lambda num_workers: busiest_link(num_workers, options),
        transport="ZeroMQ",
        sets=f"messages of at most {options.slice_kib} KiB",
    ),
    probe=installed("zmq", "pip install pyzmq"),
    refuses=_refuses,
)
