"""The NCCL variables that a scenario may set, and whose effective values are recorded.

Everything else that starts with ``NCCL_`` is refused in a scenario and kept out of the ranks'
environment, so that what is recorded is all that was in force. Defaults are NCCL 2.30's.
"""

from __future__ import annotations

from collections.abc import Mapping

NCCL_ALLOWED: dict[str, str] = {
    # which network
    "NCCL_SOCKET_IFNAME": "interfaces of the socket transport and of bootstrap",
    "NCCL_OOB_NET_IFNAME": "interfaces of bootstrap alone",
    "NCCL_SOCKET_FAMILY": "AF_INET or AF_INET6",
    "NCCL_IB_HCA": "InfiniBand or RoCE devices",
    "NCCL_IB_DISABLE": "1: sockets instead of InfiniBand (0)",
    "NCCL_NET": "network module by name",
    "NCCL_NET_PLUGIN": "network plugin by name or path",
    "NCCL_CROSS_NIC": "rings across rails: 0 never, 1 always, 2 if better (2)",
    "NCCL_IB_MERGE_NICS": "ports of one NIC as one device (1)",
    "NCCL_NETDEVS_POLICY": "which devices a GPU uses",
    # the path on RoCE and InfiniBand
    "NCCL_IB_GID_INDEX": "GID index (-1: automatic)",
    "NCCL_IB_ROCE_VERSION_NUM": "RoCE version (2)",
    "NCCL_IB_TC": "traffic class (-1)",
    "NCCL_IB_SL": "service level (-1)",
    "NCCL_IB_QPS_PER_CONNECTION": "queue pairs per connection (1)",
    "NCCL_IB_SPLIT_DATA_ON_QPS": "split each message over them (0)",
    "NCCL_IB_ADAPTIVE_ROUTING": "adaptive routing",
    "NCCL_IB_SUBNET_AWARE_ROUTING": "choose NICs by subnet (0)",
    # surviving dark time
    "NCCL_IB_TIMEOUT": "retransmission wait of 4.096 us x 2^n (20)",
    "NCCL_IB_RETRY_CNT": "retransmissions (7)",
    "NCCL_IB_RETURN_ASYNC_EVENTS": "fatal device events end the operation (1)",
    "NCCL_SOCKET_RETRY_CNT": "connection attempts (34)",
    "NCCL_SOCKET_RETRY_SLEEP_MSEC": "pause between them (100)",
    "NCCL_SOCKET_POLL_TIMEOUT_MSEC": "poll limit (0: none)",
    "NCCL_SOCKET_NTHREADS": "helper threads per connection",
    "NCCL_NSOCKS_PERTHREAD": "sockets per helper thread",
    # built-in failover
    "NCCL_IB_RESILIENCY_PORT_FAILOVER": "move to another port on failure (0)",
    "NCCL_IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS": "failovers (1)",
    "NCCL_IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY": "ms before a probe (10)",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY": "go back to a port that recovers (0)",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_START_DELAY": "ms before recovery begins (200)",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT": "ms (4000)",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT": "ms (5000)",
    "NCCL_IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX": "attempts (5)",
    # topology and algorithms
    "NCCL_TOPO_FILE": "topology to use",
    "NCCL_TOPO_DUMP_FILE": "write the detected topology",
    "NCCL_GRAPH_FILE": "graph to use",
    "NCCL_GRAPH_DUMP_FILE": "write the graph",
    "NCCL_ALGO": "algorithms allowed",
    "NCCL_PROTO": "protocols allowed",
    "NCCL_MIN_NCHANNELS": "fewest channels",
    "NCCL_MAX_NCHANNELS": "most channels",
    "NCCL_NVLS_ENABLE": "NVLink SHARP: 0, 1 or 2 automatic (2)",
    # making communicators
    "NCCL_COMM_BLOCKING": "blocking communicators",
    "NCCL_RUNTIME_CONNECT": "connect at first use (1)",
    "NCCL_COMM_SPLIT_SHARE_RESOURCES": "children share their parent's resources",
    "NCCL_COMM_SHRINK_SHARE_RESOURCES": "the same for shrink",
    # watching
    "NCCL_DEBUG": "log level",
    "NCCL_DEBUG_FILE": "log file",
    "NCCL_DEBUG_SUBSYS": "subsystems that log",
    "NCCL_RAS_ENABLE": "the RAS threads (1)",
    "NCCL_RAS_ADDR": "their address",
    "NCCL_RAS_TIMEOUT_FACTOR": "scale of their timeouts (1)",
}


def refused_names(names: Mapping[str, str]) -> list[str]:
    """Return the names in `names` that a scenario may not set, sorted."""
    return sorted(name for name in names if name not in NCCL_ALLOWED)
