"""Whole machines as their kernels show them, written by hand from the documented formats."""

from __future__ import annotations

from collections.abc import Mapping

from tests.sysfs import Link

Tree = dict[str, str | int]
HWMON = "/sys/class/hwmon"
THERMAL = "/sys/class/thermal"
CPUS = "/sys/devices/system/cpu"
MEMINFO = (
    "MemTotal: 8000000 kB\nMemFree: 200000 kB\nMemAvailable: 5000000 kB\n"
    "SwapTotal: 4000000 kB\nSwapFree: 4000000 kB"
)
PRESSURE = (
    "some avg10=2.50 avg60=0.10 avg300=0.00 total=388204\nfull avg10=1.25 avg60=0.05 avg300=0.00 total=178734"
)


def memory(own_cgroup: str = "0::/user.slice/session-1.scope") -> Tree:
    return {
        "/proc/meminfo": MEMINFO,
        "/proc/pressure/memory": PRESSURE,
        "/proc/self/cgroup": own_cgroup,
        "/sys/fs/cgroup/cgroup.controllers": "cpu memory",
    }


def zones(temperatures: Mapping[str, int | str]) -> Tree:
    tree: Tree = {}
    for number, (kind, temp) in enumerate(temperatures.items()):
        folder = f"{THERMAL}/thermal_zone{number}"
        tree |= {f"{folder}/type": kind, f"{folder}/temp": temp}
    return tree


def coolers(states: Mapping[str, tuple[int, int]]) -> Tree:
    tree: Tree = {}
    for number, (kind, (now, most)) in enumerate(states.items()):
        folder = f"{THERMAL}/cooling_device{number}"
        tree |= {f"{folder}/type": kind, f"{folder}/cur_state": now, f"{folder}/max_state": most}
    return tree


def policy(number: int, now_khz: int, limit_khz: int, max_khz: int) -> Tree:
    folder = f"{CPUS}/cpufreq/policy{number}"
    return {
        f"{folder}/scaling_cur_freq": now_khz,
        f"{folder}/scaling_max_freq": limit_khz,
        f"{folder}/cpuinfo_max_freq": max_khz,
    }


def devfreq(name: str, now_hz: int, limit_hz: int, steps_hz: str) -> Tree:
    folder = f"/sys/class/devfreq/{name}"
    return {
        f"{folder}/cur_freq": now_hz,
        f"{folder}/max_freq": limit_hz,
        f"{folder}/available_frequencies": steps_hz,
    }


def ina3221(
    address: str,
    rails: Mapping[str, tuple[int, int]],  # label -> mV, mA
    hwmon: int = 3,
    driver: str = "ina3221",
    inner: str = "hwmon/hwmon3",
    in_class: bool = True,
) -> Tree:
    """A monitor of three channels; `inner` is where its channels lie below the device's folder."""
    device = f"/sys/devices/platform/c240000.i2c/i2c-1/{address}"
    inner = inner.replace("hwmon3", f"hwmon{hwmon}")
    folder = f"{device}/{inner}".rstrip("/")
    tree: Tree = {
        f"{folder}/name": driver,
        f"{folder}/in7_label": "sum of shunt voltages",
        f"{folder}/in7_input": 3,
    }
    tree |= {f"{folder}/curr4_input": 1234}
    for channel, (label, (volt, amp)) in enumerate(rails.items(), 1):
        tree |= {
            f"{folder}/in{channel}_label": label,
            f"{folder}/in{channel}_input": volt,
            f"{folder}/curr{channel}_input": amp,
            f"{folder}/in{channel + 3}_input": amp // 20,
        }
    tree[f"/sys/bus/i2c/drivers/{driver}/{address}"] = Link(device)
    if in_class:
        tree[f"{HWMON}/hwmon{hwmon}"] = Link(folder)
        if inner:
            tree[f"{folder}/device"] = Link(device)
    return tree


def pi4() -> Tree:
    return {
        "/proc/device-tree/model": "Raspberry Pi 4 Model B Rev 1.4\0",
        "/usr/bin/vcgencmd": "",
        "/dev/vcio": "",
        f"{HWMON}/hwmon0/name": "cpu_thermal",
        f"{HWMON}/hwmon0/temp1_input": 51_121,
        f"{HWMON}/hwmon1/name": "rpi_volt",
        f"{HWMON}/hwmon1/in0_lcrit_alarm": 0,
        **zones({"cpu-thermal": 51_121}),
        **coolers({"cpufreq-cpu0": (0, 4)}),
        **policy(0, 1_500_000, 1_800_000, 1_800_000),
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": "0::/user.slice",
    }


PI_ANSWERS = {
    "vcgencmd get_throttled": "throttled=0x50000\n",
    "vcgencmd measure_clock arm": "frequency(0)=1500345728\n",
    "vcgencmd measure_temp": "temp=51.1'C\n",
}


def pi5() -> Tree:
    return {
        **pi4(),
        "/proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
        f"{HWMON}/hwmon2/name": "pwmfan",
        f"{HWMON}/hwmon2/fan1_input": 2800,
        **coolers({"pwm-fan": (3, 4), "cpufreq-cpu0": (2, 9)}),
        **policy(0, 1_900_000, 1_900_000, 2_400_000),
    }


def pmic(rails: Mapping[str, tuple[float, float]]) -> str:
    """What `vcgencmd pmic_read_adc` prints for rails with ampere and volt, and for the two that only have volt."""
    amps = [f"  {name}_A current({n})={amp:.8f}A" for n, (name, (amp, _)) in enumerate(rails.items())]
    volts = [f"  {name}_V volt({n})={volt:.8f}V" for n, (name, (_, volt)) in enumerate(rails.items(), 8)]
    return "\n".join([*amps, *volts, "  EXT5V_V volt(24)=5.15090000V", "  BATT_V volt(25)=0.00683760V", ""])


def orin_nano() -> Tree:
    """Jetson Orin Nano, JetPack 6, with the video units powered down."""
    return {
        "/proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
        "/usr/bin/tegrastats": "",
        **ina3221("1-0040", {"VDD_IN": (5040, 968), "VDD_CPU_GPU_CV": (5032, 160), "VDD_SOC": (5032, 288)}),
        f"{HWMON}/hwmon3/curr1_max_alarm": 0,
        f"{HWMON}/hwmon3/curr1_crit_alarm": 0,
        f"{HWMON}/hwmon4/name": "soctherm_oc",
        **{f"{HWMON}/hwmon4/oc{n}_event_cnt": count for n, count in ((1, 0), (2, 15), (3, 37))},
        **{f"{HWMON}/hwmon4/oc{n}_throt_en": 1 for n in (1, 2, 3)},
        **zones({"cpu-thermal": 48_500, "gpu-thermal": 47_800, "cv0-thermal": 0, "tj-thermal": 48_500}),
        f"{THERMAL}/thermal_zone0/trip_point_0_type": "passive",
        f"{THERMAL}/thermal_zone0/trip_point_0_temp": 99_000,
        **coolers({"pwm-fan": (1, 3), "cpu-throttle-alert": (0, 2), "hot-surface-alert": (1, 1)}),
        **policy(0, 729_600, 1_510_400, 1_510_400),
        **devfreq("17000000.gpu", 306_000_000, 624_750_000, "306000000 408000000 624750000"),
        **memory(),
    }


def agx_orin() -> Tree:
    first = {"VDD_GPU_SOC": (19_000, 200), "VDD_CPU_CV": (19_000, 100), "VIN_SYS_5V0": (5000, 900)}
    second = {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 120), "NC ": (0, 0)}
    return {
        "/proc/device-tree/compatible": "nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0",
        **ina3221("1-0040", first, hwmon=2),
        **ina3221("1-0041", second, hwmon=3),
        **zones({"cpu-thermal": 52_000, "gpu-thermal": 50_000}),
        **policy(0, 2_201_600, 2_201_600, 2_201_600),
        **memory(),
    }


def thor() -> Tree:
    rails = {"VDD_GPU": (19_000, 50), "VDD_CPU_SOC_MSS": (19_000, 340), "VIN_SYS_5V0": (5000, 1300)}
    return {
        "/proc/device-tree/compatible": "nvidia,p4071-0000+p3834-0008\0nvidia,tegra264\0",
        **ina3221("1-0040", rails, hwmon=2),
        f"{HWMON}/hwmon4/name": "ina238",
        f"{HWMON}/hwmon4/in0_input": 5,
        f"{HWMON}/hwmon4/in1_input": 19_800,
        f"{HWMON}/hwmon4/curr1_input": 1161,
        f"{HWMON}/hwmon4/power1_input": 23_000_000,
        f"{HWMON}/hwmon4/temp1_input": 37_750,
        f"{HWMON}/hwmon5/name": "ucsi_source_psy_1_0008",
        f"{HWMON}/hwmon5/in0_input": 5000,
        f"{HWMON}/hwmon5/curr1_input": 3000,
        f"{HWMON}/hwmon5/power1_input": 15_000_000,
        **zones({"tj-thermal": 55_100, "cpu-thermal": 53_700, "gpu-thermal": 55_000}),
        **coolers({"cpu-throttle-alert": (0, 2), "devfreq-gpu-gpc-0": (0, 169), "cpufreq-cpu0": (0, 48)}),
        **policy(0, 2_601_000, 2_601_000, 2_601_000),
        **devfreq("gpu-gpc-0", 315_000_000, 1_575_000_000, "315000000 1575000000"),
        **memory(),
    }


def nano_jetpack4() -> Tree:
    device = "/sys/devices/50000000.host1x/546c0000.i2c/i2c-6/6-0040"
    tree: Tree = {"/sys/bus/i2c/drivers/ina3221x/6-0040": Link(device)}
    rails = {"POM_5V_IN": (5000, 460, 2300), "POM_5V_GPU": (5000, 16, 80), "POM_5V_CPU": (5000, 88, 440)}
    for number, (name, (volt, amp, power)) in enumerate(rails.items()):
        folder = f"{device}/iio:device0"
        tree |= {
            f"{folder}/rail_name_{number}": name,
            f"{folder}/in_voltage{number}_input": volt,
            f"{folder}/in_current{number}_input": amp,
            f"{folder}/in_power{number}_input": power,
        }
    return {
        **tree,
        **zones({"AO-therm": 39_000, "CPU-therm": 30_500, "GPU-therm": 28_000, "PMIC-Die": 100_000}),
        **coolers({"pwm-fan": (0, 3), "thermal-fan-est": (0, 1), "gpu-balanced": (0, 9)}),
        **policy(0, 1_224_000, 1_479_000, 1_479_000),
        **devfreq("57000000.gpu", 76_800_000, 921_600_000, "76800000 921600000"),
        **memory(),
    }


def intel_laptop() -> Tree:
    powercap = "/sys/class/powercap"
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "uncore",
             "intel-rapl:1": "psys", "intel-rapl-mmio:0": "package-0"}  # fmt: skip
    tree: Tree = {}
    for zone, name in names.items():
        tree |= {
            f"{powercap}/{zone}/name": name,
            f"{powercap}/{zone}/energy_uj": 1_000_000,
            f"{powercap}/{zone}/max_energy_range_uj": 262_143_328_850,
        }
    for cpu in range(2):
        folder = f"{CPUS}/cpu{cpu}/thermal_throttle"
        tree |= {f"{folder}/{kind}_throttle_count": 3 for kind in ("core", "package")}
        tree |= {f"{folder}/{kind}_throttle_total_time_ms": 120 for kind in ("core", "package")}
    battery = "/sys/class/power_supply/BAT0"
    return {
        **tree,
        f"{battery}/type": "Battery",
        f"{battery}/status": "Discharging",
        f"{battery}/capacity": 71,
        f"{battery}/power_now": 9_870_000,
        f"{battery}/voltage_now": 11_800_000,
        "/sys/class/power_supply/AC/type": "Mains",
        "/sys/class/power_supply/AC/online": 0,
        f"{HWMON}/hwmon0/name": "AC",
        f"{HWMON}/hwmon1/name": "acpitz",
        f"{HWMON}/hwmon1/temp1_input": 25_000,
        f"{HWMON}/hwmon2/name": "BAT0",
        f"{HWMON}/hwmon2/in0_input": 11_800,
        f"{HWMON}/hwmon2/power1_input": 9_870_000,
        f"{HWMON}/hwmon5/name": "coretemp",
        f"{HWMON}/hwmon5/temp1_input": 61_000,
        f"{HWMON}/hwmon5/temp1_label": "Package id 0",
        f"{HWMON}/hwmon5/temp2_input": 60_000,
        f"{HWMON}/hwmon5/temp2_label": "Core 0",
        **zones({"acpitz": 25_000, "x86_pkg_temp": 61_000, "INT3400 Thermal": 20_000}),
        **coolers({"Processor": (0, 3), "intel_powerclamp": (-1, 50), "Fan": (1, 1)}),
        **policy(0, 2_800_000, 4_200_000, 4_200_000),
        **memory(),
    }


def amd_server() -> Tree:
    """Two dies that both show the counter of their one socket."""
    tree: Tree = {}
    for die in range(2):
        folder = f"/sys/class/powercap/intel-rapl:{die}"
        tree |= {
            f"{folder}/name": f"package-0-die-{die}",
            f"{folder}/energy_uj": 40_000_000_000 + die * 800,
            f"{folder}/max_energy_range_uj": 65_532_610_987,
        }
    return {
        **tree,
        f"{HWMON}/hwmon0/name": "k10temp",
        f"{HWMON}/hwmon0/temp1_input": 81_500,
        f"{HWMON}/hwmon0/temp1_label": "Tctl",
        f"{HWMON}/hwmon0/temp2_input": 54_500,
        f"{HWMON}/hwmon0/temp2_label": "Tdie",
        f"{HWMON}/hwmon1/name": "nvme",
        f"{HWMON}/hwmon1/temp1_input": 38_850,
        f"{HWMON}/hwmon2/name": "nvme",
        f"{HWMON}/hwmon2/temp1_input": 41_850,
        **policy(0, 3_000_000, 3_400_000, 3_400_000),
        **memory(),
    }


def container() -> Tree:
    return {}
