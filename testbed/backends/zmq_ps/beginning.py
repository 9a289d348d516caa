"""Which exchange carries out which verb."""

from __future__ import annotations

from testbed.backends.zmq_ps.delivering import DeliverExchange
from testbed.backends.zmq_ps.exchanges import Exchange, GatherExchange, Place, Ticket
from testbed.backends.zmq_ps.merging import CutMergeExchange, MergeExchange
from testbed.backends.zmq_ps.owners import Owners
from testbed.compression.mergers import build
from testbed.nouns import Request, Verb


def begin(request: Request, ticket: Ticket, place_: Place, owners: Owners) -> Exchange:
    """The exchange that carries a request out, which is about to start on its channel."""
    match request.verb:
        case Verb.GATHER:
            return GatherExchange(request, ticket, place_)
        case Verb.DELIVER:
            return DeliverExchange(request, ticket, place_)
        case Verb.MERGE if request.parts:
            return CutMergeExchange(request, ticket, place_)
        case Verb.MERGE:
            num_bytes = build(request.note).dense_bytes
            owner = owners.owner(request.channel, request.key, num_bytes)
            return MergeExchange(request, ticket, place_, owner)
        case _:
            return Exchange(request, ticket, place_)
