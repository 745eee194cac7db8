"""Memory: what is available is MemAvailable, and never more than the tightest cgroup leaves."""

from __future__ import annotations

import errno

import pytest

from outrider.power.sensors.memory import Memory
from tests.boards import PRESSURE, memory
from tests.sysfs import Board, board_fixture, only, reasons, values  # noqa: F401

V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"
MB = 1_000_000


def read(board: Board, quantity: str) -> dict[str, float]:
    return values(only(Memory.find(board.system)).read(), quantity)


def test_available_is_memavailable_not_memfree_and_not_swap(board: Board) -> None:
    board.add(memory())
    assert read(board, "memory_available") == {"memory:host": pytest.approx(5120.0)}


def test_free_swap_on_zram_is_no_headroom(board: Board) -> None:
    board.add(memory() | {"/sys/block/zram0/mm_stat": "0 0 0 0 0 0 0 0 0"})
    board.add({"/proc/meminfo": "MemAvailable: 1000 kB\nSwapTotal: 9000000 kB\nSwapFree: 9000000 kB"})
    assert read(board, "memory_available") == {"memory:host": pytest.approx(1.024)}


def test_a_kernel_without_memavailable_gives_a_reason(board: Board) -> None:
    board.add(memory() | {"/proc/meminfo": "MemTotal: 1000 kB\nMemFree: 900 kB"})
    assert (
        "no MemAvailable"
        in reasons(only(Memory.find(board.system)).read(), "memory_available")["memory:host"]
    )


def test_the_tightest_limit_on_the_way_to_the_root_counts(board: Board) -> None:
    board.add(memory("0::/a/b"))
    board.add({f"{V2}/a/b/memory.max": "max", f"{V2}/a/b/memory.current": 100 * MB})
    board.add({f"{V2}/a/memory.max": 900 * MB, f"{V2}/a/memory.current": 500 * MB})
    board.add({f"{V2}/a/memory.stat": f"active_file {50 * MB}\ninactive_file {150 * MB}"})
    assert read(board, "memory_limit") == {"memory:cgroup": 900.0}
    assert read(board, "memory_used") == {"memory:cgroup": 300.0}
    assert read(board, "memory_available")["memory:cgroup"] == 600.0


def test_the_limit_with_the_least_room_wins_over_the_smallest(board: Board) -> None:
    board.add(memory("0::/a/b"))
    board.add({f"{V2}/a/b/memory.max": 500 * MB, f"{V2}/a/b/memory.current": 10 * MB})
    board.add({f"{V2}/a/memory.max": 900 * MB, f"{V2}/a/memory.current": 850 * MB})
    assert read(board, "memory_limit") == {"memory:cgroup": 900.0}


def test_memory_high_is_a_limit_too(board: Board) -> None:
    board.add(memory("0::/a"))
    board.add({f"{V2}/a/memory.max": 900 * MB, f"{V2}/a/memory.high": 700 * MB, f"{V2}/a/memory.current": 1})
    assert read(board, "memory_limit") == {"memory:cgroup": 700.0}


def test_no_limit_is_said_to_be_none(board: Board) -> None:
    board.add(memory("0::/a") | {f"{V2}/a/memory.max": "max", f"{V2}/a/memory.current": 1})
    readings = only(Memory.find(board.system)).read()
    assert "no cgroup above this process limits" in reasons(readings, "memory_limit")["memory:cgroup"]
    assert values(readings, "memory_available") == {"memory:host": pytest.approx(5120.0)}


@pytest.mark.parametrize("own", ["0::/", "0::/../outside", "0::/system.slice/docker-123.scope"])
def test_a_container_whose_path_is_the_hosts_reads_its_mount(board: Board, own: str) -> None:
    board.add(memory(own) | {f"{V2}/memory.max": 300 * MB, f"{V2}/memory.current": 100 * MB})
    board.add({"/sys/fs/outside/memory.max": 1, "/sys/fs/outside/memory.current": 1})
    assert read(board, "memory_limit") == {"memory:cgroup": 300.0}


def test_version_1_limits_are_read_and_its_huge_number_is_no_limit(board: Board) -> None:
    board.add(memory("9:name=systemd:/\n4:cpu,memory:/job\n0::/"))
    board.add(
        {f"{V1}/job/memory.limit_in_bytes": 9_223_372_036_854_771_712, f"{V1}/job/memory.usage_in_bytes": 1}
    )
    assert read(board, "memory_limit") == {}
    board.add({f"{V1}/memory.limit_in_bytes": 400 * MB, f"{V1}/memory.usage_in_bytes": 300 * MB})
    pages = f"active_file 1\ninactive_file 1\ntotal_active_file {40 * MB}\ntotal_inactive_file {60 * MB}"
    board.add({f"{V1}/memory.stat": pages})
    assert read(board, "memory_available")["memory:cgroup"] == 200.0


def test_a_limit_that_is_overdrawn_leaves_nothing(board: Board) -> None:
    board.add(memory("0::/a") | {f"{V2}/a/memory.max": 100 * MB, f"{V2}/a/memory.current": 120 * MB})
    assert read(board, "memory_available")["memory:cgroup"] == 0.0


def test_a_switched_off_memory_controller_falls_back_to_memavailable(board: Board) -> None:
    board.add(memory("0::/user.slice"))
    readings = only(Memory.find(board.system)).read()
    assert values(readings, "memory_available") == {"memory:host": pytest.approx(5120.0)}
    assert "controller off" in reasons(readings, "memory_limit")["memory:cgroup"]


def test_pressure_is_the_share_of_time_in_which_all_tasks_waited(board: Board) -> None:
    board.add(memory())
    assert read(board, "memory_pressure") == {"memory:pressure": 1.25}


def test_absent_pressure_says_how_to_have_it(board: Board) -> None:
    board.add({name: text for name, text in memory().items() if "pressure" not in name})
    assert "psi=1" in reasons(only(Memory.find(board.system)).read(), "memory_pressure")["memory:pressure"]


def test_pressure_that_is_switched_off_says_how_to_have_it(board: Board) -> None:
    board.add(memory())
    board.break_file("/proc/pressure/memory", errno.EOPNOTSUPP)
    reason = reasons(only(Memory.find(board.system)).read(), "memory_pressure")["memory:pressure"]
    assert "switched off" in reason
    assert "psi=1" in reason


def test_pressure_that_may_not_be_read_is_not_blamed_on_the_boot_line(board: Board) -> None:
    board.add(memory())
    board.break_file("/proc/pressure/memory", errno.EACCES)
    reason = reasons(only(Memory.find(board.system)).read(), "memory_pressure")["memory:pressure"]
    assert "permission denied" in reason
    assert "psi=1" not in reason


def test_pressure_of_a_form_that_is_not_known_gives_a_reason(board: Board) -> None:
    board.add(memory() | {"/proc/pressure/memory": "some avg10=1.00"})
    assert (
        "full stalls" in reasons(only(Memory.find(board.system)).read(), "memory_pressure")["memory:pressure"]
    )


EVENTS = "low 0\nhigh {high}\nmax {max}\noom 9\noom_kill 9\noom_group_kill 0"


def events(board: Board) -> float | str:
    """How often a limit was reached, or why that is not known."""
    readings = only(Memory.find(board.system)).read()
    return {**values(readings, "memory_events"), **reasons(readings, "memory_events")}["memory:cgroup"]


def test_limits_that_were_reached_are_counted_at_every_level_and_no_other_group_s_are(board: Board) -> None:
    board.add(memory("0::/a/b"))
    for folder, high, most in (("/a/b", 3, 4), ("/a", 20, 0), ("", 0, 100)):
        board.add({f"{V2}{folder}/memory.events.local": EVENTS.format(high=high, max=most)})
        board.add({f"{V2}{folder}/memory.events": EVENTS.format(high=1000, max=1000)})
    assert events(board) == 3 + 4 + 20 + 100
    for folder in ("/a/b", "/a", ""):  # Linux before 5.2
        board.remove(f"{V2}{folder}/memory.events.local")
    assert events(board) == 2000
    (reading,) = [r for r in only(Memory.find(board.system)).read() if r.quantity == "memory_events"]
    assert (reading.scope, reading.method) == ("process", "counter")


@pytest.mark.parametrize("own", ["0::/", "0::/../outside", "0::/system.slice/docker-123.scope"])
def test_a_container_s_own_events_and_pressure_are_at_its_mount(board: Board, own: str) -> None:
    board.add(memory(own) | {f"{V2}/memory.events": EVENTS.format(high=0, max=7)})
    board.add({f"{V2}/memory.pressure": PRESSURE.replace("1.25", "40.00")})
    assert events(board) == 7
    assert read(board, "memory_pressure") == {"memory:pressure": 1.25, "memory:cgroup": 40.0}


def test_version_1_counts_failed_charges_and_has_no_pressure_of_its_own(board: Board) -> None:
    board.add(memory("4:cpu,memory:/job") | {f"{V1}/job/memory.failcnt": 2, f"{V1}/memory.failcnt": 5})
    assert events(board) == 7
    board.add({f"{V1}/job/memory.memsw.failcnt": 4})  # with the same limit it is the one that is reached
    assert events(board) == 11
    for name in ("job/memory.failcnt", "job/memory.memsw.failcnt", "memory.failcnt"):
        board.break_file(f"{V1}/{name}", errno.EACCES)
    assert "/job/memory.failcnt: permission denied" in str(events(board))
    readings = only(Memory.find(board.system)).read()
    assert "no memory.pressure" in reasons(readings, "memory_pressure")["memory:cgroup"]


def test_the_pressure_of_a_hybrid_system_is_in_its_unified_tree(board: Board) -> None:
    board.add(memory("4:memory:/job\n0::/a") | {f"{V2}/unified/a/memory.pressure": PRESSURE})
    assert read(board, "memory_pressure")["memory:cgroup"] == 1.25


def test_events_and_pressure_that_cannot_be_read_say_why(board: Board) -> None:
    board.add(memory("0::/a"))
    assert "no cgroup of this process counts" in str(events(board))
    board.add({f"{V2}/a/memory.events": "populated 1", f"{V2}/a/memory.pressure": PRESSURE})
    assert "'populated 1', without counts" in str(events(board))
    for name in ("memory.events", "memory.pressure"):
        board.break_file(f"{V2}/a/{name}", errno.EACCES)
    assert "/a/memory.events: permission denied" in str(events(board))
    board.break_file(f"{V2}/a/memory.pressure", errno.EOPNOTSUPP)
    readings = only(Memory.find(board.system)).read()
    assert "switched off" in reasons(readings, "memory_pressure")["memory:cgroup"]


def test_no_broken_file_stops_the_others(board: Board) -> None:
    board.add(memory())
    board.break_file("/proc/meminfo", errno.EIO)
    assert read(board, "memory_pressure")
