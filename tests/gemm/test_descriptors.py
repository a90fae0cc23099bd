"""The descriptors that a launch keeps: never another one's, whatever changes, and none that was refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]

PROGRAM = r"""
#include "gemm/sm90/descriptors.h"

#include <cstdio>
#include <random>

using epigemm::sm90::DescriptorCache;
using epigemm::sm90::DescriptorShape;

// A driver whose descriptors are their arguments. It refuses odd addresses, and spoils what it was to change then.
struct Map {
  DescriptorShape shape;
  uintptr_t address = 0;
};

bool operator==(const Map& a, const Map& b) { return a.shape == b.shape && a.address == b.address; }

struct Caller {
  DescriptorCache<Map> cache;
  int encodes = 0, replaces = 0;
  bool can_replace = true;

  int get(Map* map, const DescriptorShape& shape, uintptr_t address) {
    return cache.get(
        map, shape, reinterpret_cast<void*>(address),
        [&](Map* made, void* at) {
          ++encodes;
          *made = Map{};
          if (reinterpret_cast<uintptr_t>(at) % 2) return 1;
          *made = Map{shape, reinterpret_cast<uintptr_t>(at)};
          return 0;
        },
        [&](Map* made, void* at) {
          ++replaces;
          const bool is_fine = can_replace && reinterpret_cast<uintptr_t>(at) % 2 == 0;
          *made = is_fine ? Map{made->shape, reinterpret_cast<uintptr_t>(at)} : Map{};
          return is_fine ? 0 : 1;
        });
  }

  bool is_right(const DescriptorShape& shape, uintptr_t address) {
    Map map;
    const int refused = get(&map, shape, address);
    return address % 2 ? refused && map == Map{} : !refused && map == Map{shape, address};
  }

  bool is_right_after(const DescriptorShape& shape, uintptr_t address, int more_encodes, int more_replaces) {
    const int encodes_before = encodes, replaces_before = replaces;
    return is_right(shape, address) && encodes == encodes_before + more_encodes &&
           replaces == replaces_before + more_replaces;
  }
};

DescriptorShape a_shape() {
  DescriptorShape shape;
  shape.rank = 3;
  shape.sizes[0] = 64, shape.sizes[1] = 128, shape.sizes[2] = 1;
  shape.strides[0] = 128;
  shape.box[0] = 64, shape.box[1] = 128, shape.box[2] = 1;
  return shape;
}

int failures = 0;

void expect(bool is_met, const char* what) {
  if (!is_met) std::printf("%s\n", what);
  failures += !is_met;
}

void count_the_drivers_work() {
  Caller caller;
  const DescriptorShape shape = a_shape();
  expect(caller.is_right_after(shape, 32, 1, 0), "the first is made");
  expect(caller.is_right_after(shape, 32, 0, 0), "the second is a copy");
  expect(caller.is_right_after(shape, 48, 0, 1), "another address is put in");
  expect(caller.is_right_after(shape, 48, 0, 0), "and kept");
  caller.can_replace = false;
  expect(caller.is_right_after(shape, 64, 1, 1), "an address that cannot be put in: made anew");
  caller.can_replace = true;
  expect(caller.is_right_after(shape, 65, 1, 1), "refused");
  expect(caller.is_right_after(shape, 65, 1, 0), "refused again");
  expect(caller.is_right_after(shape, 64, 1, 0), "what was refused is not kept");
}

void change_every_byte() {
  for (std::size_t i = 0; i < sizeof(DescriptorShape); ++i) {
    Caller caller;
    const DescriptorShape shape = a_shape();
    DescriptorShape other = shape;
    reinterpret_cast<unsigned char*>(&other)[i] ^= 1;
    for (int round = 0; round < 2; ++round) {
      expect(caller.is_right(shape, 32) && caller.is_right(other, 32), "one byte's difference");
    }
  }
}

void change_at_random() {
  std::mt19937 random(1);
  const auto below = [&](unsigned n) { return random() % n; };
  Caller caller;
  for (int i = 0; i < 200000; ++i) {
    DescriptorShape shape = a_shape();
    shape.sizes[0] += below(20);
    shape.box[1] += below(10);
    shape.swizzle = below(2);
    caller.can_replace = below(10) > 0;
    expect(caller.is_right(shape, 32 + below(5)), "at random");
  }
  expect(caller.replaces > 1000 && caller.encodes > 1000, "both roads were taken");
}

int main() {
  count_the_drivers_work();
  change_every_byte();
  change_at_random();
  return failures != 0;
}
"""


def test_a_descriptor_is_that_of_its_arguments(tmp_path: Path) -> None:
    assert COMPILER is not None
    source, binary = tmp_path / "descriptors.cpp", tmp_path / "descriptors"
    source.write_text(PROGRAM)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(binary)], check=True)
    run = subprocess.run([str(binary)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[:2000]
