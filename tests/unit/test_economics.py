"""Bills and what performance costs: published figures to the printed digit, and what is refused.

Quoted from MixNet (SIGCOMM'25) and its public calculator: the prices, which are in the file that
ships; `COSTS`, `CELLS` and `PAPER` below; `SPEED`, quotients of its public iteration times; and
what the calculator's formulas are. The times are taken as they are: nothing here verifies them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadFile, UsageError
from harness.model.bench import Bench, Generated
from harness.model.generated import REFERENCE, bench_of
from harness.model.generated_rules import expanded
from harness.model.load import load_bench
from harness.rlsim.bills import Bill, Network, bill_of, bill_of_bench, network_of
from harness.rlsim.economics import (
    Design,
    Gpu,
    aligned,
    cost_rows,
    relative,
    relative_rows,
    tell_bill,
    worth_of,
    worth_rows,
)
from harness.rlsim.prices import POWER, PRICES, Price, load_power, load_prices

BENCHES = Path(__file__).parents[2] / "scenarios" / "benches"
P, W = load_prices(), load_power()
RATES = (100, 200, 400, 800)
FREE = Gpu(usd=0, w=0)
MIXNET: dict[str, Any] = {"kind": "mixnet", "circuit_nics_per_server": 6}
COSTS = {
    "fat-tree": ("2.70", "4.95", "11.63", "18.53"),
    "mixnet": ("1.77", "2.76", "5.08", "7.95"),
    "topoopt": ("1.03", "1.61", "2.47", "3.99"),
}
"""$M of 1024 GPUs, one NIC each."""
CELLS = {
    "Mixtral 8x22B": ("1.44", "1.78", "2.22", "2.36"),
    "Mixtral 8x7B": ("1.48", "1.76", "2.29", "2.33"),
    "Llama-MoE": ("1.20", "1.44", "1.93", "1.96"),
    "Qwen-MoE": ("1.26", "1.53", "2.03", "2.21"),
}
"""MixNet's performance per network $, times the fat-tree's."""
SPEED = {
    "Mixtral 8x22B": (0.9451, 0.9945, 0.9711, 1.0114),
    "Mixtral 8x7B": (0.9688, 0.9828, 0.9993, 0.9990),
    "Llama-MoE": (0.7849, 0.8025, 0.8418, 0.8392),
    "Qwen-MoE": (0.8251, 0.8518, 0.8860, 0.9493),
}
"""Iteration time of the fat-tree over MixNet's, by the calculator's public table of times."""
PAPER = (("1.2", "1.5"), ("1.4", "1.8"), ("1.9", "2.3"), ("2.0", "2.4"))


def bill(rate: float = 400, **numbers: Any) -> Bill:
    numbers = {"kind": "fat-tree", "gpus": 1024, **numbers}
    return bill_of(Network(rate_gbit_per_s=rate, **numbers), P, W)


def rfabric(rate: float = 400, **numbers: Any) -> Bill:
    size = numbers.get("gpus", 1024)
    return bill(rate, **{"kind": "rfabric", "uplinks": size, "trunks": size, **numbers})


def gain(speed: float, better: Bill, baseline: Bill, gpu: Gpu) -> tuple[float, float]:
    """Performance per network $, and per $ with GPUs, times the baseline's."""
    ratio = relative(
        worth_of(Design("better", speed, better), gpu), worth_of(Design("base", 1.0, baseline), gpu)
    )
    assert ratio.per_network_usd is not None
    assert ratio.per_usd is not None
    return ratio.per_network_usd, ratio.per_usd


# -- MixNet's published figures --------------------------------------------------------------------


@pytest.mark.parametrize("kind", COSTS)
def test_costs_of_a_thousand_gpus_are_the_published_ones(kind: str) -> None:
    numbers = MIXNET if kind == "mixnet" else {"kind": kind}
    assert tuple(f"{bill(rate, **numbers).usd / 1e6:.2f}" for rate in RATES) == COSTS[kind]


def test_mixnet_is_cheaper_by_the_published_ratios() -> None:
    ratios = [bill(rate).usd / bill(rate, **MIXNET).usd for rate in RATES]
    assert [f"{ratio:.2f}" for ratio in ratios] == ["1.52", "1.79", "2.29", "2.33"]
    assert f"{sum(ratios) / 4:.2f}" == "1.98"


def test_performance_per_network_dollar_is_that_of_every_published_cell() -> None:
    told = {
        model: tuple(
            f"{gain(speed, bill(rate, **MIXNET), bill(rate), FREE)[0]:.2f}"
            for rate, speed in zip(RATES, speeds, strict=True)
        )
        for model, speeds in SPEED.items()
    }
    assert told == CELLS


@pytest.mark.parametrize("k", range(4))
def test_all_ends_of_the_papers_bands_are_met(k: int) -> None:
    better, baseline = bill(RATES[k], **MIXNET), bill(RATES[k])
    gains = [gain(speeds[k], better, baseline, FREE)[0] for speeds in SPEED.values()]
    assert (f"{min(gains):.1f}", f"{max(gains):.1f}") == PAPER[k]


@pytest.mark.parametrize(
    ("k", "low", "high"), [(0, 0.81, 1.00), (1, 0.85, 1.06), (2, 1.00, 1.18), (3, 1.07, 1.29)]
)
def test_with_gpus_in_the_divisor_the_gain_is_small_or_none(
    k: int, low: float, high: float
) -> None:
    better, baseline = bill(RATES[k], **MIXNET), bill(RATES[k])
    gains = [gain(speeds[k], better, baseline, Gpu())[1] for speeds in SPEED.values()]
    assert min(gains) == pytest.approx(low, abs=0.01)
    assert max(gains) == pytest.approx(high, abs=0.01)


def test_the_network_alone_as_divisor_ranks_a_slow_cheap_network_first() -> None:
    slow, fat = bill(kind="topoopt"), bill()
    speed = 3.24 * slow.usd / fat.usd  # 3.24 is published; this is 0.69 of the fat-tree's speed
    network, cluster = gain(speed, slow, fat, Gpu())
    mixnet, mixnet_cluster = gain(SPEED["Mixtral 8x22B"][2], bill(**MIXNET), fat, Gpu())
    assert network > mixnet
    assert cluster < 1 < mixnet_cluster


# -- what the calculator's own formulas would give -------------------------------------------------


def site(rate: int, *, nic: float, optic: float, eps: float, ocs: float, fibre: float) -> float:
    """$ per NIC of so many of each."""
    return (
        nic * P.usd("nic", rate)
        + optic * P.usd("transceiver", rate)
        + eps * P.usd("eps_port", rate)
        + ocs * P.usd("ocs_port", rate)
        + fibre * P.usd("fibre", rate)
    )


def site_fat_tree(rate: int) -> float:
    """The top tier counted twice."""
    return site(rate, nic=1, optic=7, eps=6, ocs=0, fibre=3.5)


def site_mixnet(rate: int) -> float:
    """Of u = 1/4 and c = 3/4: 6u + 1 transceivers, 3u + c fibres, and no EPS port at all."""
    return site(rate, nic=1, optic=2.5, eps=0, ocs=1, fibre=1.5)


def site_repaired(rate: int) -> float:
    """The same with its 6u EPS ports, and OCS ports for c alone."""
    return site(rate, nic=1, optic=2.5, eps=1.5, ocs=0.75, fibre=1.5)


def test_the_calculator_counts_otherwise_and_its_ratios_are_not_the_papers() -> None:
    plain = [site_fat_tree(rate) / site_mixnet(rate) for rate in RATES]
    repaired = [site_fat_tree(rate) / site_repaired(rate) for rate in RATES]
    ours = [bill(rate).usd / bill(rate, **MIXNET).usd for rate in RATES]
    assert [f"{ratio:.2f}" for ratio in plain] == ["1.82", "2.28", "3.39", "3.23"]
    assert [f"{ratio:.2f}" for ratio in repaired] == ["1.66", "1.94", "2.44", "2.48"]
    assert f"{sum(plain) / 4:.2f} {sum(repaired) / 4:.2f}" == "2.68 2.13"
    worst = max(theirs / our for theirs, our in zip(plain, ours, strict=True))
    assert f"{worst - 1:.0%}" == "48%"


def test_the_calculators_performance_per_dollar_is_beyond_the_papers_bands() -> None:
    for k, (low, high) in enumerate([(1.43, 1.76), (1.83, 2.27), (2.85, 3.38), (2.71, 3.27)]):
        ratio = site_fat_tree(RATES[k]) / site_mixnet(RATES[k])
        gains = [speeds[k] * ratio for speeds in SPEED.values()]
        assert min(gains) == pytest.approx(low, abs=0.01)
        assert max(gains) == pytest.approx(high, abs=0.01)
        assert f"{max(gains):.1f}" != PAPER[k][1]


# -- the other designs -----------------------------------------------------------------------------


def ports_usd(whole: Bill) -> float:
    """Per GPU, of what orchestration papers count: optics and ports, no NIC, no fibre."""
    return whole.of("transceiver", "eps_port", "ocs_port").usd / whole.gpus


@pytest.mark.parametrize(
    ("rate", "fat", "one", "two", "ratios"),
    [
        (100, 1529, 2231, 3791, "0.69 0.40"),
        (200, 3304, 3025, 4585, "1.09 0.72"),
        (400, 9404, 5717, 7277, "1.64 1.29"),
        (800, 15394, 8557, 10117, "1.80 1.52"),
    ],
)
def test_rfabric_pays_from_200g_on_with_one_ocs_port_per_duplex_link(
    rate: int, fat: int, one: int, two: int, ratios: str
) -> None:
    circuits = [rfabric(rate, oversubscription=math.inf, ocs_ports_per_end=k) for k in (1, 2)]
    assert [ports_usd(bill(rate)), *map(ports_usd, circuits)] == [fat, one, two]
    told = " ".join(f"{ports_usd(bill(rate)) / ports_usd(each):.2f}" for each in circuits)
    assert told == ratios


@pytest.mark.parametrize("rate", RATES)
def test_a_four_to_one_fat_tree_costs_less_than_half(rate: int) -> None:
    ratio = ports_usd(bill(rate)) / ports_usd(bill(rate, oversubscription=4))
    assert f"{ratio:.1f}" in ("2.2", "2.3")
    assert ports_usd(bill(rate, oversubscription=4)) < ports_usd(bill(rate, oversubscription=2))


def test_the_electrical_path_is_a_fat_trees_above_the_tors() -> None:
    without, with_ = rfabric(oversubscription=math.inf), rfabric(oversubscription=4)
    above = bill(oversubscription=4).usd - bill(oversubscription=1e9).usd
    one_link = 2 * (2 * P.usd("transceiver", 400) + 2 * P.usd("eps_port", 400) + 150)
    assert with_.usd - without.usd == above + one_link
    assert rfabric(oversubscription=4, tiers=2).usd < with_.usd


def test_rail_designs_have_the_textbooks_counts() -> None:
    items = ("nic", "transceiver", "eps_port", "ocs_port", "patch_port", "fibre")
    rails = bill(kind="rail-optimised")
    assert rails.lines == bill().lines
    assert [rails.count(item) / 1024 for item in items] == [1, 6, 5, 0, 0, 3]
    assert [bill(kind="rail-only").count(item) / 1024 for item in items] == [1, 4, 3, 0, 0, 2]


def test_optics_draw_less() -> None:
    assert rfabric(oversubscription=math.inf).w < bill(kind="rail-only").w < bill().w
    assert rfabric().of("ocs_port").w < 0.01 * rfabric().w


def test_an_ideal_switch_has_no_bill_and_no_worth_but_a_performance() -> None:
    ideal = bill(kind="ideal")
    assert not ideal.is_priced
    assert worth_of(Design("ideal", 2.0, ideal), Gpu()) == (2.0, None, None, None, None)
    assert tell_bill(ideal)[1:] == ["an ideal switch: an upper bound, without a bill"]


# -- benches ---------------------------------------------------------------------------------------


def test_a_bench_of_the_reference_is_billed_as_its_design() -> None:
    """2 x 8 ToRs of 32 hosts, 32 uplinks each, 256 trunks a pod, 4:1."""
    billed = bill_of_bench(bench_of(REFERENCE), P, W)
    assert billed.lines == rfabric(gpus=512, oversubscription=4).lines


GENERATED: list[tuple[Generated, dict[str, Any]]] = [
    (
        Generated(fabric="rfabric", gpus=1024),
        {"uplinks": 1024, "trunks": 1024, "oversubscription": 4},
    ),
    (
        Generated(fabric="rfabric", gpus=1024, core_planes=0),
        {"uplinks": 1024, "oversubscription": 4},
    ),
    (Generated(fabric="fat-tree", gpus=1024, oversubscription=2), {"oversubscription": 2}),
    (Generated(fabric="rail-optimised", gpus=1024), {}),
    (Generated(fabric="rail-only", gpus=1024), {}),
    (Generated(fabric="topoopt", gpus=1024), {}),
    (Generated(fabric="mixnet", gpus=1024), {"circuit_nics_per_server": 6}),
    (Generated(fabric="ideal", gpus=1024), {}),
]


@pytest.mark.parametrize(("table", "numbers"), GENERATED)
def test_a_generated_bench_is_billed_as_the_design_it_stands_for(
    table: Generated, numbers: dict[str, Any]
) -> None:
    """MixNet's servers share out their NICs 2 to 6, as its authors' do."""
    bench = expanded(Bench(name="b", world="simulated", generated=table))
    assert bill_of_bench(bench, P, W) == bill(kind=table.fabric, **numbers)


@pytest.mark.parametrize("fabric", ["rfabric", "fat-tree", "rail-optimised", "rail-only"])
def test_a_design_with_tors_is_billed_alike_by_its_cables(fabric: Any) -> None:
    bench = expanded(
        Bench(name="b", world="simulated", generated=Generated(fabric=fabric, gpus=1024))
    )
    written = msgspec.structs.replace(bench, generated=None)
    assert bill_of_bench(written, P, W).lines == bill_of_bench(bench, P, W).lines
    with pytest.raises(UsageError, match="bench b: no table"):
        network_of(written)


def test_a_bench_is_billed_as_it_is_cabled() -> None:
    """Four ToRs of a host each; two uplinks each on two switches."""
    bench = load_bench(BENCHES / "emulated-4.toml")
    billed = bill_of_bench(bench, P, W, rate_gbit_per_s=100, ocs_ports_per_end=2)
    assert billed.count("nic") == 4
    assert [line.count for line in billed.lines if line.item == "ocs_port"] == [16]
    assert billed.count("eps_port") == 4 + 8 + 2 * 2 * 4, "hosts, uplinks, two tiers of one a ToR"


def test_ports_that_are_ours_without_a_cable_are_paid_for() -> None:
    bench = load_bench(BENCHES / "emulated-4.toml")
    wider = msgspec.structs.replace(bench.switches["agg0"], ports="1-6,17-22")
    bench = msgspec.structs.replace(bench, switches={**bench.switches, "agg0": wider})
    lines = bill_of_bench(bench, P, W, rate_gbit_per_s=100).lines
    assert [(line.what, line.count) for line in lines if "without" in line.what] == [
        ("ours, without a cable", 2)
    ]


def test_nodes_that_state_no_gpus_are_told() -> None:
    bench = load_bench(BENCHES / "emulated-4.toml")
    told = tell_bill(bill_of_bench(bench, P, W, rate_gbit_per_s=100))
    assert told[-1] == "4 nodes state no GPUs, and count as one each"


def test_a_bench_of_a_rate_without_prices_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nic.usd: no figure at 1 Gbit/s; known: 100, 200, 400"):
        bill_of_bench(load_bench(BENCHES / "emulated-4.toml"), P, W)


# -- what holds of every bill ----------------------------------------------------------------------

NETWORKS = st.builds(
    lambda kind, servers, rate, over, ports: Network(
        kind=kind,
        gpus=8 * servers,
        rate_gbit_per_s=rate,
        oversubscription=1 if kind == "topoopt" else over,
        circuit_nics_per_server=6 if kind == "mixnet" else 0,
        uplinks=8 * servers if kind == "rfabric" else 0,
        trunks=4 * servers if kind == "rfabric" else 0,
        ocs_ports_per_end=ports,
    ),
    kind=st.sampled_from(
        ["fat-tree", "rail-optimised", "rail-only", "topoopt", "mixnet", "rfabric"]
    ),
    servers=st.integers(1, 500).map(lambda k: 4 * k),
    rate=st.sampled_from(RATES),
    over=st.sampled_from([1, 2, 4, 8]),
    ports=st.sampled_from([1, 2]),
)


@given(NETWORKS, st.integers(2, 5))
def test_cost_and_power_grow_with_size(network: Network, times: int) -> None:
    larger = replace(
        network,
        gpus=times * network.gpus,
        uplinks=times * network.uplinks,
        trunks=times * network.trunks,
    )
    small, large = bill_of(network, P, W), bill_of(larger, P, W)
    assert large.usd == pytest.approx(times * small.usd)
    assert large.w == pytest.approx(times * small.w)


@given(NETWORKS)
def test_lines_are_positive_and_make_the_sum(network: Network) -> None:
    whole = bill_of(network, P, W)
    assert all(line.count > 0 and line.usd > 0 and line.w >= 0 for line in whole.lines)
    assert whole.count("nic") == network.gpus
    assert sum(whole.of(item).usd for item in {line.item: 0 for line in whole.lines}) == whole.usd


@given(st.integers(1, 300), st.floats(1, 64))
def test_fewer_links_above_the_tors_never_cost_more(servers: int, over: float) -> None:
    cheaper = bill(gpus=8 * servers, oversubscription=over)
    assert cheaper.usd <= bill(gpus=8 * servers).usd
    above = [line.count for line in cheaper.lines if "core" in line.what and line.item == "fibre"]
    assert above == [math.ceil(8 * servers / over)]


def test_an_ocs_port_costs_the_same_at_every_rate_and_no_other_port_does() -> None:
    assert len({P.usd("ocs_port", rate) for rate in RATES}) == 1
    assert len({P.usd("eps_port", rate) for rate in RATES}) == 4


# -- what is told ----------------------------------------------------------------------------------


def test_a_bill_tells_each_line_the_sum_and_where_figures_come_from() -> None:
    told = tell_bill(bill(gpus=8, kind="topoopt"))
    assert told == [
        "topoopt: 8 GPUs in servers of 8 with 8 NICs of 400 Gbit/s",
        "item              what for            count  $ each       $  W each     W",
        "NIC               hosts, on circuits      8   1,499  11,992   25.00   200",
        "transceiver       hosts, on circuits      8     659   5,272    9.00    72",
        "patch-panel port  towards hosts           8     100     800    0.00     0",
        "fibre             hosts to circuits       8     150   1,200    0.00     0",
        "all                                                  19,264           272",
        "per GPU                                               2,408          34.0",
        "prices: list prices of 2025",
        "power: figures of 2025 (NIC, patch-panel port: assumed)",
    ]


def test_tables_name_units_in_every_column_and_leave_out_what_is_unknown() -> None:
    designs = [
        Design("fat-tree", 100.0, bill()),
        Design("rfabric", 99.0, rfabric()),
        Design("ideal", 101.0, bill(kind="ideal")),
    ]
    costs, worth = cost_rows(designs, Gpu()), worth_rows(designs, Gpu(), "steps/h")
    ratios = relative_rows(designs, Gpu(), "fat-tree")
    assert all("$" in head or "kW" in head for head in costs[0][1:])
    assert all("steps/h" in head for head in worth[0][1:])
    assert costs[1][1:] == ("11.63", "42.35", "11,353", "157.7", "874.5")
    assert worth[1][1:4] == ("100", "8.602", "2.362")
    assert ratios[1] == ("fat-tree", *["1.00"] * 5)
    assert ratios[3] == ("ideal", "1.01", "-", "-", "-", "-")
    assert len({len(line) for line in aligned(ratios)}) == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"gpus": 12}, "gpus = 12 do not fill servers of 8"),
        ({"gpus": 0}, "gpus = 0: expected 1 or more"),
        ({"uplinks": 8}, "uplinks = 8: expected 0"),
        ({"kind": "rfabric", "uplinks": -1}, "uplinks = -1: expected 0 or more"),
        ({"kind": "rfabric", "trunks": 8}, "nothing reaches them without uplinks"),
        ({"kind": "mixnet"}, "circuit_nics_per_server = 0: expected 1 to 8"),
        ({"kind": "mixnet", "circuit_nics_per_server": 9}, "= 9: expected 1 to 8"),
        ({"oversubscription": math.inf}, "oversubscription = inf: expected 1"),
        ({"oversubscription": math.nan}, "oversubscription = nan: expected 1"),
        ({"oversubscription": 0.5}, "oversubscription = 0.5: expected 1"),
        ({"kind": "topoopt", "oversubscription": 4}, "there are no packet switches to bill"),
        ({"kind": "ideal", "tiers": 3}, "there are no packet switches to bill"),
        ({"tiers": 4}, "tiers = 4: expected 2 or 3, or 0, which is 3"),
        ({"rate": 50}, "list prices of 2025: nic.usd: no figure at 50 Gbit/s"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        bill(**numbers)
    assert message in str(refused.value)


def test_a_price_of_nothing_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(PRICES.read_text().replace("400 = 520.0", "400 = 0.0"))
    with pytest.raises(BadFile, match=r"ocs_port.usd.400 = 0: nothing is free; expected US \$"):
        load_prices(file)
    free = Price(usd={"400": 0.0}, date="", source="")
    with pytest.raises(UsageError, match=r"fibre.usd.400 = 0: nothing is free"):
        bill_of(Network(kind="fat-tree", gpus=8), msgspec.structs.replace(P, fibre=free), W)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[ocs_port]", "[oca_port]", "did you mean 'ocs_port'?"),
        ("100 = 99.0, 200", '"fast" = 99.0, 200', "transceiver.usd.fast: the key is a rate"),
        ("[nic]", "[nic", "not TOML"),
        ("100 = 659.0", 'note = "x", 100 = 659.0', "nic.usd.note: expected a number"),
    ],
)
def test_a_wrong_file_of_prices_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    file = tmp_path / "prices.toml"
    text = PRICES.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(BadFile) as refused:
        load_prices(file)
    assert str(file) in str(refused.value)
    assert message in str(refused.value)


def test_a_wrong_file_of_power_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "power.toml"
    file.write_text(POWER.read_text().replace("400 = 15.0", "400 = -1").replace('"glass"', '" "'))
    with pytest.raises(BadFile) as refused:
        load_power(file)
    assert refused.value.problems == [
        "fibre.source: say where the figures come from",
        "eps_port.w.400 = -1: expected 0 or more",
    ]
    with pytest.raises(BadFile, match="cannot be read: No such file"):
        load_prices(tmp_path / "none.toml")


def test_a_baseline_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no design 'torus' to compare with; there are fat-tree"):
        relative_rows([Design("fat-tree", 1.0, bill())], Gpu(), "torus")
