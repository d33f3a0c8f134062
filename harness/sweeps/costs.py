"""What the network of a point costs: the bill of its fabric, by a table of prices and one of power.

Fabrics are billed by the textbook (`harness.rlsim.bills`), with the sizes that the point's bench
has: no more and no other links than those that were simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from harness.rlsim.bills import Bill, Network, bill_of, network_of
from harness.rlsim.economics import tell_bill
from harness.rlsim.prices import POWER, PRICES, load_power, load_prices
from harness.sweeps.bench import bench_of
from harness.sweeps.results import Price, Result


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
