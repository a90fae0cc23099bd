"""The names of open kernels, under plain g++: each stands for one kernel, and leads back to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.functors import COMPILER, CSRC

pytestmark = [
    pytest.mark.skipif(not CSRC.is_dir(), reason="sources are not at hand"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]

PROGRAM = r"""
#include "gemm/sm90_tma/open.h"
#include "link/kernels.h"

#include <cstdio>

using namespace epigemm;

// What names do not depend on.
const EpilogueInfo& epigemm::epilogue_info(EpilogueId) {
  static const EpilogueInfo info{};
  return info;
}
bool epigemm::sm90_tma::has_matrix_by_tma(const Problem&) { return false; }

bool leads_back(const link::KernelKey& key) {
  const std::string name = link::name(key);
  const auto found = link::key_named(name);
  const bool same = found && found->part == key.part && found->element == key.element &&
                    found->arithmetic == key.arithmetic && found->tile == key.tile &&
                    found->has_matrix_by_tma == key.has_matrix_by_tma;
  if (!same) std::printf("%s leads to another kernel\n", name.c_str());
  return same;
}

int main() {
  int wrong = link::key_named("epigemm_open_nothing").has_value();
  for (int tile = 0; tile < 8; ++tile) {
    for (auto arithmetic : {Arithmetic::Split, Arithmetic::Scaled}) {
      wrong += !leads_back({link::Part::sm90_fp16x3, ElementType::Float32, arithmetic, tile});
    }
    for (auto element : {ElementType::Float16, ElementType::BFloat16, ElementType::Float32}) {
      for (bool has_matrix : {false, true}) {
        wrong += !leads_back({link::Part::sm90_tma, element, Arithmetic::IEEE, tile, has_matrix});
      }
      wrong += !leads_back({link::Part::sm90_swap_ab, element, Arithmetic::IEEE, tile});
    }
  }
  for (auto part : {link::Part::elementwise, link::Part::derivative}) {
    for (auto element : {ElementType::Float16, ElementType::BFloat16, ElementType::Float32, ElementType::Float64}) {
      wrong += !leads_back({part, element});
    }
  }
  wrong += !leads_back({link::Part::fixup}) + !leads_back({link::Part::fp32});
  return wrong;
}
"""


def test_a_name_leads_back_to_its_kernel(tmp_path: Path) -> None:
    source, program = tmp_path / "names.cpp", tmp_path / "names"
    source.write_text(PROGRAM)
    command = [
        COMPILER,
        "-std=c++17",
        f"-I{CSRC}",
        str(source),
        str(CSRC / "link" / "kernels.cpp"),
        "-o",
        str(program),
    ]
    subprocess.run([each for each in command if each], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
