"""A compiler launcher for CMake: run the compiler, measure it, keep what ptxas reports.

Usage: `python compile_unit.py --log DIRECTORY [ccache] nvcc ARGUMENTS...`

Appends one line of JSON per unit to DIRECTORY/units.jsonl (seconds, CPU seconds, peak memory of the largest process,
whether ccache answered) and writes the compiler's output to DIRECTORY/<unit>.log. `build_report.py` reads both.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def unit_name(command: list[str]) -> str:
    """The object file's name without the build tree around it: "epigemm_sm90/sm90/bias_float16"."""
    if "-o" not in command[:-1]:
        return ""
    output = command[command.index("-o") + 1]
    match = re.search(r"CMakeFiles/(\w+)\.dir/(?:.*?/)?((?:\w+/)?\w+)\.(?:cu|cpp)\.o$", output)
    return f"{match.group(1)}/{match.group(2)}" if match else ""


def run(command: list[str]) -> tuple[int, str, str]:
    """Run the command; its exit code, its output and ccache's verdict ("" when ccache does not run)."""
    with tempfile.NamedTemporaryFile("r", suffix=".stats") as stats:
        environment = {**os.environ, "CCACHE_STATSLOG": stats.name}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
        )
        return done.returncode, done.stdout, stats.read()


def worth_showing(line: str) -> bool:
    """Whether a line of output is more than ptxas's routine report, which goes to the log alone."""
    return bool(line.strip()) and not re.match(
        r"ptxas info|\s+\d+ bytes stack frame|.*\bCompile time = ", line
    )


def main() -> int:
    """Measure one compilation."""
    log = Path(sys.argv[2])
    command = sys.argv[3:]
    unit = unit_name(command)
    started = time.monotonic()
    code, output, verdict = run(command)
    seconds = time.monotonic() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in output.splitlines():
        if code != 0 or worth_showing(line):
            print(line, file=sys.stderr)
    if code == 0 and unit:
        record = {
            "unit": unit,
            "seconds": round(seconds, 2),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
            "peak_mib": usage.ru_maxrss // 1024,
            "cached": "cache_hit" in verdict,
        }
        report = log / f"{unit}.log"
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(output, encoding="utf-8")
        with (log / "units.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
