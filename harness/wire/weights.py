"""The messages of weight sync: one file of weights from the train pod to every node, in buckets.

Weights of a version are a safetensors file in each node's memory (``/dev/shm``). A *porter*, one
process a node, carries it over TCP: what it receives it writes, verifies, and passes on to its
children bucket by bucket, so that a chain or a tree is a pipeline. Four phases: `OpenPorter` once;
then for every version `ExpectWeights` at the receivers (start), `SendWeights` at each source
(buckets), and `harness.wire.generation.UpdateWeights` at the engines (finish).

Stamps are on the agent's monotonic clock.
"""

from __future__ import annotations

from harness.wire.generation import Span
from harness.wire.messages import Message


class OpenPorter(Message, frozen=True, kw_only=True, tag="open_porter"):
    """Start this node's porter, once. `address`: the node's on the data network. `PorterOpen`."""

    address: str


class PorterOpen(Message, frozen=True, kw_only=True, tag="porter_open"):
    """It listens at `listen` (``HOST:PORT``)."""

    listen: str
    pid: int


class ExpectWeights(Message, frozen=True, kw_only=True, tag="expect_weights"):
    """Take one transfer, pass it on to `children` (``HOST:PORT``), keep it. `WeightsArrived`.

    Answered when all of it is here, verified, and passed on; at the latest by the deadline, with
    ``Failure("Late")`` saying how much came. A child that fails is ``Failure("ChildLost")`` and
    names it; what came is kept all the same. Any earlier transfer that is still under way ends.
    """

    transfer: str
    version: int
    children: tuple[str, ...] = ()


class WeightsArrived(Message, frozen=True, kw_only=True, tag="weights_arrived"):
    """`path` holds `version`. Spans: ``receive``, ``verify``, ``forward``.

    `checksum`: CRC-32 (zlib) of the file, equal to the source's.
    """

    path: str
    version: int
    moved_bytes: int
    checksum: int
    spans: tuple[Span, ...]


class SendWeights(Message, frozen=True, kw_only=True, tag="send_weights"):
    """Send the file at `path`, weights of `version`, to `children`. Answer: `WeightsSent`.

    Raised as ``Failure("ChildLost")``, naming which, when one breaks off or stands still for
    `stall_ns`; the others still get all of it.
    """

    transfer: str
    version: int
    path: str
    children: tuple[str, ...]
    bucket_bytes: int
    stall_ns: int


class WeightsSent(Message, frozen=True, kw_only=True, tag="weights_sent"):
    """All children have all buckets, verified. Spans: ``send``: first bucket to last word back."""

    moved_bytes: int
    buckets: int
    checksum: int
    spans: tuple[Span, ...]


class ForgetWeights(Message, frozen=True, kw_only=True, tag="forget_weights"):
    """Delete files of versions below `keep_from`. Answer: `Done`."""

    keep_from: int


class ClosePorter(Message, frozen=True, kw_only=True, tag="close_porter"):
    """End the porter, delete its files. Answer: `Done`."""


WeightsBody = (
    OpenPorter
    | PorterOpen
    | ExpectWeights
    | WeightsArrived
    | SendWeights
    | WeightsSent
    | ForgetWeights
    | ClosePorter
)
