"""Report a build measured by `compile_unit.py`: kernels, seconds and peak memory per unit.

Usage: `python build_report.py DIRECTORY`
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel in ptxas's report."""

    name: str
    architecture: str
    spilled_bytes: int
    registers: int


@dataclasses.dataclass(frozen=True)
class Unit:
    """One compiled source."""

    name: str
    seconds: float
    cpu_seconds: float
    peak_mib: int
    cached: bool
    kernels: tuple[Kernel, ...]


def read_kernels(report: str) -> tuple[Kernel, ...]:
    """The kernels of one unit's compiler output (`-Xptxas -v`)."""
    kernels = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", report)[1:]:
        head = re.search(r"Compiling entry function '(\S+)' for '(\w+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if head is None or spills is None or registers is None:
            raise SystemExit(f"build_report: this part of ptxas's report is not understood:\n{part}")
        spilled = int(spills.group(1)) + int(spills.group(2))
        kernels.append(Kernel(head.group(1), head.group(2), spilled, int(registers.group(1))))
    return tuple(kernels)


def read_units(directory: Path) -> list[Unit]:
    """Every unit of the build; of a unit compiled more than once, the last time counts."""
    lines = (directory / "units.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["unit"]: record for record in map(json.loads, lines)}
    units = []
    for name, record in sorted(records.items()):
        del record["unit"]
        kernels = read_kernels((directory / f"{name}.log").read_text(encoding="utf-8"))
        units.append(Unit(name=name, kernels=kernels, **record))
    return units


def print_table(units: list[Unit]) -> None:
    """One row per unit, then the sums."""
    width = max(len(unit.name) for unit in units)
    print(f"{'unit':{width}}  kernels  registers  seconds  CPU s  peak MiB")
    for unit in units:
        registers = max((kernel.registers for kernel in unit.kernels), default=0)
        note = "  (from ccache)" if unit.cached else ""
        print(
            f"{unit.name:{width}}  {len(unit.kernels):7}  {registers:9}  {unit.seconds:7.1f}"
            f"  {unit.cpu_seconds:5.1f}  {unit.peak_mib:8}{note}"
        )
    print(
        f"{len(units)} units, {sum(len(unit.kernels) for unit in units)} kernels, "
        f"{sum(unit.cpu_seconds for unit in units):.0f} s of CPU, "
        f"at most {max(unit.peak_mib for unit in units)} MiB in one process, "
        f"{sum(unit.cached for unit in units)} units from ccache"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path, help="what was given to compile_unit.py as --log")
    units = read_units(parser.parse_args().directory)
    print_table(units)
    return 0


if __name__ == "__main__":
    sys.exit(main())
