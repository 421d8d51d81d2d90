"""The transport of real federations: NVIDIA FLARE's cell network, with mutual TLS.

Only its network layer is used (`nvflare.fuel.f3.cellnet`, over gRPC): encrypted connections,
certificates on both sides, reconnection, and the rules that the name of a client is the name in its
certificate and the server's certificate is that of its host. (Its other driver, plain TCP with TLS,
shakes hands while it accepts: a stranger who connects and stays silent would keep all others out.)
There are no jobs: a job would let the server send code to its clients, would end when a client's
process dies, and would not take a client back that returns.

Clients ask, the server answers: a client accepts no calls, so nobody on the network can make it do
anything. It pulls its next order (the server holds the call until there is one), works, and brings
the answer with the number of the order. A second process with the same identity is turned away for
as long as the first one is heard from.

`flare_server.py` and `flare_client.py` are its two ends; here is what both share.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

from sartor.network.keys import network_extra

CHANNEL = "sartor"
"""The name under which both ends speak on the cell network."""
HOLD = 2.0
"""Seconds for which the server holds a call that has nothing to bring yet."""
BEAT = 1.0
"""Seconds between signs of life of a client."""
LOST = 5.0
"""Seconds of silence after which a client counts as gone."""


def flare_names() -> Any:
    """Return what is used of NVIDIA FLARE, with its own lines kept off the screen.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its lines would run through ours
    with network_extra():
        from nvflare.fuel.f3.cellnet.core_cell import CoreCell
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
        from nvflare.fuel.f3.cellnet.utils import make_reply
        from nvflare.fuel.f3.message import Message
    logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # what matters is said by us
    return SimpleNamespace(
        CoreCell=CoreCell,
        Message=Message,
        make_reply=make_reply,
        COMMON_NAME=MessagePropKey.COMMON_NAME,
        DESTINATION=MessageHeaderKey.DESTINATION,
        RETURN_CODE=MessageHeaderKey.RETURN_CODE,
        OK=ReturnCode.OK,
        FORBIDDEN=ReturnCode.UNAUTHENTICATED,
    )
