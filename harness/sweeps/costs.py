"""What the network of a point costs: the bill of its fabric, by a table of prices and one of power.

Fabrics are billed by the textbook (`harness.rlsim.bills`), with the sizes that the point's bench
has: no more and no other links than those that were simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from harness.errors import BadFile
from harness.model.bench import Bench
from harness.model.ports import is_trunk
from harness.rlsim.bills import Bill, Network, bill_of
from harness.rlsim.economics import tell_bill
from harness.rlsim.prices import POWER, PRICES, load_power, load_prices
from harness.sweeps.bench import WHERE, bench_of
from harness.sweeps.results import Price, Result

WITH_PACKET_SWITCHES = ("fat-tree", "rail-optimised", "rail-only", "rfabric")
"""Fabrics whose bench says how their packet switches above the ToRs are oversubscribed."""


def price_by(prices_file: str = "", power_file: str = "") -> Price:
    """Return how points are priced, by these files or, where one is "", by the house's.

    Raises `BadFile` for a file that is no good.
    """
    prices = load_prices(prices_file or PRICES)
    power = load_power(power_file or POWER)

    @cache
    def bill(network: Network) -> Bill:
        return bill_of(network, prices, power)

    return lambda point: bill(network_of(bench_of(point)))


def network_of(bench: Bench) -> Network:
    """Return a generated bench, with all its tables, as bills know it. Raises `BadFile`."""
    table = bench.generated
    if table is None:
        raise BadFile(WHERE, ["generated: missing"])
    servers, trunks = len(bench.nodes), sum(map(is_trunk, bench.cables))
    uplinks = len(bench.cables) - trunks
    has_packet_switches = table.fabric in WITH_PACKET_SWITCHES
    is_rfabric = table.fabric == "rfabric"
    return Network(
        kind=table.fabric,
        gpus=table.gpus,
        gpus_per_server=table.gpus_per_server,
        nics_per_server=len(next(iter(bench.nodes.values())).tors),
        rate_gbit_per_s=table.link_gbit_per_s,
        oversubscription=bench.links.oversubscription if has_packet_switches else 1.0,
        circuit_nics_per_server=uplinks // servers if table.fabric == "mixnet" else 0,
        uplinks=uplinks if is_rfabric else 0,
        trunks=trunks if is_rfabric else 0,
    )


def bills_text(results: Sequence[Result]) -> str:
    """Return every bill line by line, each once, with the designs that it is of."""
    designs: dict[Bill, list[str]] = {}
    for result in results:
        if result.bill is not None:
            names = designs.setdefault(result.bill, [])
            if result.design not in names:
                names.append(result.design)
    parts = [
        "\n".join([f"# {', '.join(names)}", "", *tell_bill(bill)])
        for bill, names in designs.items()
    ]
    return "\n\n".join(parts) + "\n"
