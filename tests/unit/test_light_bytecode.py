"""The redirect program, run by a small interpreter of the instructions it uses."""

import struct

import pytest

from drivers.emulators.light import bpf

REDIRECTED = 7
MAP_FD = 5


# One case per instruction: cutting the interpreter up would only hide them.
def run(  # noqa: C901
    program: bytes, ifindex: int, table: dict[int, int]
) -> tuple[int, int | None]:
    """Return (verdict, interface redirected to) for one packet; memory is by symbolic address."""
    code = [struct.unpack_from("=BBhi", program, at) for at in range(0, len(program), 8)]
    registers: dict[int, object] = {1: "skb", 10: ("stack", 0)}
    memory: dict[object, int] = {}
    sent_to, at = None, 0
    while True:
        opcode, both, offset, immediate = code[at]
        dst, src = both & 15, both >> 4
        at += 1
        match opcode:
            case 0x61 if registers[src] == "skb":
                assert offset == 40, "the program reads skb->ifindex and nothing else"
                registers[dst] = ifindex
            case 0x61:
                registers[dst] = memory[registers[src]]
            case 0x63:
                memory["stack", offset] = registers[src]
            case 0xBF:
                registers[dst] = registers[src]
            case 0xB7:
                registers[dst] = immediate
            case 0x07:
                registers[dst] = ("stack", registers[dst][1] + immediate)
            case 0x18:
                assert (src, immediate) == (1, MAP_FD)
                registers[dst] = "map"
                at += 1
            case 0x15:
                at += offset if registers[dst] == immediate else 0
            case 0x85 if immediate == 1:
                assert registers[1] == "map"
                key = memory[registers[2]]
                memory["cell", key] = table.get(key, 0)
                registers[0] = ("cell", key) if key in table else 0
            case 0x85 if immediate == 23:
                sent_to, registers[0] = registers[1], REDIRECTED
                assert registers[2] == 0
            case 0x95:
                return registers[0], sent_to
            case unknown:
                pytest.fail(f"opcode {unknown:#x}")


@pytest.mark.parametrize(
    ("ifindex", "expected"),
    [(3, (REDIRECTED, 8)), (4, (bpf.TC_ACT_SHOT, None)), (99, (bpf.TC_ACT_SHOT, None))],
    ids=["lit", "dark", "beyond the table"],
)
def test_a_packet_leaves_where_the_table_says_or_not_at_all(
    ifindex: int, expected: tuple[int, int | None]
) -> None:
    assert run(bpf.redirect_program(MAP_FD), ifindex, {3: 8, 4: 0}) == expected


def test_instructions_are_packed_as_the_kernel_reads_them() -> None:
    assert bpf.instruction(0xB7, 0, immediate=2) == bytes.fromhex("b700000002000000")
    assert bpf.instruction(0x63, 10, 2, -4) == bytes.fromhex("632afcff00000000")


def test_the_call_has_its_number_on_the_machines_we_support() -> None:
    assert bpf.SYSCALL == {"x86_64": 321, "aarch64": 280}
