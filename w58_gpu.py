"""Checks and times the kernels that read an fp32 weight as it lies. See w58_gpu.sh.

`check`: every tile of both arithmetics, forced, against float64, with poisoned results; stale, wrong and absent
remembered roots; special numbers; repeats; two streams; a graph whose weight is written between replays; then the
suite's own tests of these kernels. `time`: medians, in turn, L2 flushed. `small`: a few sizes, for compute-sanitizer.
Each part runs in a process of its own with a limit: a hang loses that part only.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import epigemm
from benchmarks.gradings import bounds, data, products

SPLIT, SCALED = products.SPLIT, products.SCALED
EPS = 2.0**-24
FAMILY = 2  # sm90_fp16x3
SLICED = {SPLIT: 4, SCALED: 3}  # tiles on slices of the weight; those that read it as it lies come behind
ROWS = {SPLIT: (128, 64, 32, 16, 8), SCALED: (256, 128, 64, 16)}  # of x, in a tile
BOUND = {SPLIT: bounds.split, SCALED: bounds.scaled}
OUT = Path("build/w58")
bad: list[str] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def expect(holds: bool, what: str) -> None:
    if not holds:
        bad.append(what)
        say("  WRONG:", what)


def plan(arithmetic: str, tile: int, raster: int = 0, swizzle: int = 8) -> tuple[int, ...]:
    return (FAMILY, SLICED[arithmetic] + tile, raster, swizzle, 1)


def tiles() -> list[tuple[str, int]]:
    return [(a, tile) for a in (SPLIT, SCALED) for tile in range(len(ROWS[a]))]


def launch(x, w, arithmetic, plan_, roots=None, out=None, bias=None, name="bias"):
    if out is None:
        out = torch.full((x.shape[0], w.shape[0]), math.nan, device=x.device)
    return products.forced_into(out, name, x, w, arithmetic, bias=bias, plan=plan_, pack=roots)


def roots_of(w: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """What is remembered of a weight: the roots of its rows' scales, off by 2^(shift / 2), as bytes."""
    largest = torch.where(w.isfinite(), w, 0.0).abs().amax(1)
    bits = largest.view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13).view(torch.float32)
    exponent = (rounded.view(torch.int32) >> 23) - 127
    e = 14 - exponent
    e = torch.where(largest < 2.0**-126, 126, torch.minimum(e - (e & 1), torch.full_like(e, 126)))
    e = (e + shift).clamp(-114, 126)
    root = ((127 - e // 2) << 23).to(torch.int32)
    return root.view(torch.uint8).contiguous().view(-1)


def error(d, x, w) -> float:
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    off = (d.double() - exact).abs() / (size * EPS)
    off[(size == 0) & (d == 0)] = 0
    return float(off.max())


def drawn(kind: str, m: int, n: int, k: int, seed: int):
    found = {c.name: c for c in data.CLASSES}[kind] if hasattr(data, "CLASSES") else None
    if found is not None:
        return found.make(m, n, k, seed, torch.device("cuda"))
    g = torch.Generator("cuda").manual_seed(seed)
    x, w = torch.randn(m, k, device="cuda", generator=g), torch.randn(n, k, device="cuda", generator=g)
    return x, w


def generic(m: int, n: int, k: int, seed: int, kind: str = "normal"):
    g = torch.Generator("cuda").manual_seed(seed)
    rand = lambda *s: torch.rand(*s, device="cuda", generator=g)
    randn = lambda *s: torch.randn(*s, device="cuda", generator=g)
    exponents = lambda *s, e: torch.randint(-e, e + 1, s, device="cuda", generator=g)
    x, w = randn(m, k), randn(n, k) / math.sqrt(k)
    if kind == "positive":
        x, w = rand(m, k), rand(n, k)
    if kind == "rows":
        x, w = torch.ldexp(x, exponents(m, 1, e=60)), torch.ldexp(w, exponents(n, 1, e=60))
    if kind == "columns":
        d = exponents(1, k, e=30)
        x, w = torch.ldexp(x, d), torch.ldexp(w, -d)
    if kind == "wide":
        x, w = torch.ldexp(x, exponents(m, k, e=20)), torch.ldexp(w, exponents(n, k, e=20))
    if kind == "relu":
        x = x.relu()
    if kind == "sparse":  # both fall short of large elements, and some are tiny: the fixup counts and sums
        x, w = x * (rand(m, k) < 0.4), w * (rand(n, k) < 0.4)
        x[:, ::97] *= 2.0**-40
        w[:, ::89] *= 2.0**-40
    if kind == "subnormal":
        w = torch.ldexp(w, torch.full((), -135, device="cuda"))
    return x, w


KINDS = ("normal", "positive", "rows", "columns", "wide", "relu", "sparse", "subnormal")
# Ragged M, N and K; whole tiles; less than a stage of K; more tiles than multiprocessors; a long sum.
SHAPES = [(1, 4, 4), (3, 8, 60), (16, 64, 64), (33, 132, 100), (77, 332, 1000), (129, 260, 4100), (300, 1000, 2052),
          (128, 128, 128), (640, 1100, 512), (17, 8200, 1028), (2100, 1300, 260), (128, 1024, 8192)]


def of_values() -> None:
    for arithmetic, tile in tiles():
        worst, text = 0.0, ""
        for index, (m, n, k) in enumerate(SHAPES):
            for kind in KINDS if index % 3 == 0 else KINDS[:3]:
                x, w = generic(m, n, k, 100 * index + KINDS.index(kind), kind)
                d = launch(x, w, arithmetic, plan(arithmetic, tile, index % 2, (1, 2, 4, 8)[index % 4]))
                off = error(d, x, w)
                limit = BOUND[arithmetic](k) / EPS + 4
                name = f"{arithmetic} tile {ROWS[arithmetic][tile]} {m}x{n}x{k} {kind}: {off:.2f} of {limit:.0f}"
                # Where SGEMM's own arithmetic runs in the fixup the bound is K eps.
                expect(off <= max(limit, k + 4), name)
                if kind == "normal" and off > worst:
                    worst, text = off, name
                again = launch(x, w, arithmetic, plan(arithmetic, tile, 1 - index % 2, 8))
                expect(torch.equal(d.view(torch.int32), again.view(torch.int32)), f"other bits: {name}")
        say("values", arithmetic, ROWS[arithmetic][tile], "worst of normal:", text)


def of_frames() -> None:
    """Nothing beside the result is written, and rows of padded matrices are read."""
    for arithmetic, tile in tiles():
        m, n, k = 150, 264, 200
        x, w = generic(m, n, k, 5)
        wide = torch.full((n, k + 8), math.nan, device="cuda")
        wide[:, :k] = w
        frame = torch.full((m + 4, n + 16), 7.0, device="cuda")
        out = frame[2 : m + 2, 8 : n + 8]
        out.fill_(math.nan)
        launch(x, wide[:, :k], arithmetic, plan(arithmetic, tile), out=out)
        expect(error(out, x, w) <= BOUND[arithmetic](k) / EPS + 4, f"frame {arithmetic} {tile}")
        out.fill_(7.0)
        expect(bool((frame == 7.0).all()), f"written beside {arithmetic} {tile}")
    say("frames done")


def of_roots() -> None:
    """The bits do not depend on what is remembered, and what is remembered is put right."""
    for arithmetic, tile in tiles():
        for m, n, k, swizzle in ((70, 520, 328, 2), (700, 1500, 136, 8)):
            x, w = generic(m, n, k, 11, "rows")
            w[7] = 0.0
            w[n // 2] *= 2.0**-100
            where = plan(arithmetic, tile, 0, swizzle)
            right = roots_of(w)
            fresh = launch(x, w, arithmetic, where)  # no remembered roots: computed at the call
            kept = right.clone()
            expect(torch.equal(launch(x, w, arithmetic, where, roots=kept).view(torch.int32), fresh.view(torch.int32)),
                   f"right roots, other bits: {arithmetic} {tile}")
            expect(torch.equal(kept, right), f"right roots were changed: {arithmetic} {tile}")
            g = torch.Generator("cuda").manual_seed(3)
            garbage = torch.randint(0, 256, (4 * n,), dtype=torch.uint8, device="cuda", generator=g)
            stale = {f"2^{shift}": roots_of(w, shift) for shift in (2, -2, 20, -20, 60, -60, 200, -200)}
            stale |= {"garbage": garbage, "zeros": torch.zeros_like(right), "ones": torch.full_like(right, 255)}
            one = right.clone()
            one.view(torch.float32)[n - 1] *= 2.0
            stale["one row"] = one
            for name, roots in stale.items():
                d = launch(x, w, arithmetic, where, roots=roots)
                expect(torch.equal(d.view(torch.int32), fresh.view(torch.int32)),
                       f"stale by {name}, other bits: {arithmetic} {tile} {m}")
                # A remembered root is cleaned of what is no root only where it was wrong.
                wrong = ~(roots.view(torch.int32) == right.view(torch.int32))
                expect(not bool(wrong.any()) or name in ("garbage", "zeros", "ones"), f"not put right: {name} {arithmetic} {tile}")
                d = launch(x, w, arithmetic, where, roots=roots)
                expect(torch.equal(d.view(torch.int32), fresh.view(torch.int32)), f"second call, {name}")
        say("roots", arithmetic, ROWS[arithmetic][tile], "done")


def of_special() -> None:
    """NaN and infinities land where exact arithmetic has them, with right and with stale roots."""
    for arithmetic, tile in tiles():
        x, w = generic(140, 264, 328, 21)
        w[200, 0], w[3, 327], w[64] = -math.inf, math.nan, 0.0
        x[5, 7], x[139, 100] = math.inf, math.nan
        w[130] = torch.finfo(torch.float32).max / 1024
        w[131] = 2.0**-145
        exact = x.double() @ w.double().T
        for roots in (None, roots_of(w), roots_of(w, 20), torch.zeros(4 * 264, dtype=torch.uint8, device="cuda")):
            d = launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots)
            expect(torch.equal(d.isnan(), exact.isnan()), f"NaN {arithmetic} {tile}")
            infinite = exact.isinf() | (exact.abs() > torch.finfo(torch.float32).max)
            expect(torch.equal(d.isinf() & ~exact.isnan(), infinite & ~exact.isnan()), f"infinite {arithmetic} {tile}")
            finite = exact.isfinite() & ~infinite
            clean_x, clean_w = torch.where(x.isfinite(), x, 0.0), torch.where(w.isfinite(), w, 0.0)
            size = clean_x.double().abs() @ clean_w.double().abs().T
            off = ((d.double() - exact).abs() / (size * EPS + 2.0**-149))[finite]
            expect(float(off.max()) <= BOUND[arithmetic](328) / EPS + 4, f"finite ones {arithmetic} {tile}: {float(off.max())}")
    say("special done")


def of_integers() -> None:
    for arithmetic, tile in tiles():
        g = torch.Generator("cuda").manual_seed(4)
        x = torch.randint(-1, 2, (300, 1024), device="cuda", generator=g).float()
        w = torch.randint(-1, 2, (520, 1024), device="cuda", generator=g).float()
        d = launch(x, w, arithmetic, plan(arithmetic, tile))
        expect(torch.equal(d, (x.double() @ w.double().T).float()), f"integers {arithmetic} {tile}")
    say("integers done")


def of_writes() -> None:
    """A weight that is written between calls, on two streams and under a graph; a thousand repeats."""
    arithmetic, tile = SPLIT, 0
    x, w = generic(256, 1024, 512, 31)
    roots = roots_of(w)
    out = torch.empty(256, 1024, device="cuda")
    launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots, out=out)
    for step in range(40):
        w.mul_(2.0 ** ((step * 7) % 41 - 20)) if step % 3 else w.normal_()
        graph.replay()
        expect(torch.equal(out.view(torch.int32), launch(x, w, arithmetic, plan(arithmetic, tile)).view(torch.int32)),
               f"graph, step {step}")
    first = launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots)
    side = torch.cuda.Stream()
    for _ in range(500):
        roots.view(torch.float32).mul_(4.0)
        torch.cuda.synchronize()
        a = launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots)
        with torch.cuda.stream(side):
            b = launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots)
        torch.cuda.synchronize()
        if not (torch.equal(a, first) and torch.equal(b, first)):
            expect(False, "two streams")
            break
    say("writes done")


def of_epilogues() -> None:
    for name in ("bias_relu", "bias_gelu", "relu_div"):
        for arithmetic, tile in tiles():
            x, w = generic(200, 304, 512, 41)
            b = torch.randn(304, device="cuda")
            want = x.double() @ w.double().T
            if name == "relu_div":
                out = torch.full((200, 304), math.nan, device="cuda")
                d = products.forced_into(out, name, x, w, arithmetic, bias=b, scalars=(2.0,), plan=plan(arithmetic, tile)) \
                    if "relu_div" == name else None
                want = (want + b.double()).relu() / 2
            else:
                d = launch(x, w, arithmetic, plan(arithmetic, tile), bias=b, name=name)
                want = want + b.double()
                want = want.relu() if name == "bias_relu" else torch.nn.functional.gelu(want)
            expect(float((d.double() - want).abs().max()) < (2e-5 if arithmetic == SPLIT else 2e-2), f"{name} {arithmetic} {tile}")
    say("epilogues done")


def of_suite() -> None:
    """The suite's tests of the kernels on slices, and of all that share kernel.cuh: nothing else has changed."""
    files = ["tests/gemm/test_split_fused_gpu.py", "tests/gemm/test_split_rows.py", "tests/gemm/test_fused_gpu.py",
             "tests/gemm/test_pairs_gpu.py", "tests/gemm/test_stores_gpu.py", "tests/csrc/test_open_names.py", "tests/gemm/test_as_it_lies_gpu.py"]
    found = [f for f in files if Path(f).is_file()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-n", "4", *found], capture_output=True, text=True)
    say(done.stdout[-1500:])
    expect(done.returncode == 0, "the suite's tests")


def of_small() -> None:
    for arithmetic, tile in tiles():
        for m, n, k in ((17, 132, 100), (130, 260, 136)):
            x, w = generic(m, n, k, 1)
            x[0, 0] = w[1, 1] = math.inf
            launch(x, w, arithmetic, plan(arithmetic, tile))
            launch(x, w, arithmetic, plan(arithmetic, tile), roots=roots_of(w, 20))
    torch.cuda.synchronize()


# --- times -----------------------------------------------------------------------------------------------------------
TIMED = [(128, 32768, 32768), (1024, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 4096), (256, 8192, 8192),
         *((m, 8192, 8192) for m in (1, 2, 4, 8, 16, 32, 64, 128)), (2048, 1024, 4096), (512, 4096, 11008)]


def medians(calls: dict[str, object], budget_s: float = 12) -> dict[str, float]:
    """Milliseconds of each, in turn, L2 flushed before each."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    start, rounds = time.time(), 0
    while rounds < 30 and (rounds < 5 or time.time() - start < budget_s):
        for name, call in calls.items():
            flush.zero_()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # the host is ahead
            a.record(), call(), b.record()
            torch.cuda.synchronize()
            if rounds >= 2:
                times[name].append(a.elapsed_time(b))
        rounds += 1
    return {name: statistics.median(each) for name, each in times.items()}


def of_times() -> None:
    table = []
    for m, n, k in TIMED:
        g = torch.Generator("cuda").manual_seed(1)
        x = torch.randn(m, k, device="cuda", generator=g)
        w = torch.randn(n, k, device="cuda", generator=g) / math.sqrt(k)
        out = torch.empty(m, n, device="cuda")
        roots, calls = roots_of(w), {}
        for arithmetic in (SPLIT, SCALED):
            pack = products.make_pack(w, arithmetic)
            found = products.plan_of("bias", m, n, k, arithmetic, packed=True)
            best = tuple(found["candidates"][0]["plan"]) if found["candidates"] else products.ANY_TILE
            calls[f"{arithmetic} pack"] = lambda a=arithmetic, p=pack, b=best: launch(x, w, a, b, roots=p, out=out)
            calls[f"{arithmetic} split at every call"] = lambda a=arithmetic, b=best: launch(x, w, a, b, out=out)
            for tile, rows in enumerate(ROWS[arithmetic]):
                if rows > 64 and m <= rows // 4 or rows < 64 and m > 2 * rows:
                    continue
                for raster in (0, 1) if m > rows else (0,):
                    where = plan(arithmetic, tile, raster)
                    calls[f"{arithmetic} lies {rows} {'mn'[raster]} remembered"] = (
                        lambda a=arithmetic, p=where: launch(x, w, a, p, roots=roots, out=out))
                    if raster == 0:
                        calls[f"{arithmetic} lies {rows} m roots at every call"] = (
                            lambda a=arithmetic, p=where: launch(x, w, a, p, out=out))
        calls["SGEMM"] = lambda: products.sgemm(x, w)
        calls["TF32"] = lambda: products.tf32(x, w)
        found = medians(calls)
        table.append({"shape": [m, n, k], "ms": found})
        say(f"{m}x{n}x{k}")
        for name, ms in found.items():
            say(f"    {ms:8.4f} ms  {2e-9 * m * n * k / ms:7.1f} TFLOP/s  {4e-9 * n * k / ms:6.2f} TB/s of W  {name}")
        (OUT / "times.json").write_text(json.dumps(table))


def in_process(name: str, limit_s: float) -> None:
    def body(results) -> None:
        try:
            globals()[f"of_{name}"]()
            torch.cuda.synchronize()
        except BaseException as e:  # noqa: BLE001
            bad.append(f"{name}: {type(e).__name__}: {e}")
            say(f"  FAILED {bad[-1]}")
        results.put(bad)

    start, context = time.time(), multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=body, args=(results,))
    process.start()
    try:
        bad.extend(results.get(timeout=limit_s))
    except Exception:
        bad.append(f"{name}: nothing within {limit_s} s")
        process.kill()
    process.join(5)
    say(f"-- {name}: {time.time() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("check", "time", "small"))
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    OUT = given.out
    if given.what == "small":
        of_small()
    elif given.what == "time":
        in_process("times", 540)
    else:
        for part, limit in (("values", 150), ("frames", 30), ("roots", 90), ("special", 40), ("integers", 20),
                            ("writes", 40), ("epilogues", 30), ("suite", 240)):
            in_process(part, limit)
    say("WRONG:" if bad else "all right", *bad, sep="\n  ")
    sys.exit(bool(bad))
