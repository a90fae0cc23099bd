// A family of fused GEMM kernels, for the planner. It does not use CUDA, so it works on a machine without a GPU.
#pragma once

#include <functional>
#include <string>

#include "gemm/problem.h"
#include "open/kernel_names.h"

namespace epigemm {

// A tile in words, for reports.
struct TileText {
  int m, n, k;  // elements
  int cluster_m, cluster_n;
  const char* schedule;
  int shared_bytes = 0;  // of a CTA; 0: not known
};

class Family {
 public:
  using Visit = std::function<void(const Candidate&)>;

  virtual ~Family() = default;

  // Whether this family has kernels for the problem's arithmetic and element types.
  virtual bool computes(const Problem&) const = 0;

  // Whether the package has the kernels of built-in epilogues. Otherwise they are linked at first use.
  virtual bool is_prelinked() const { return true; }

  // Why the kernels do not run on the device; empty if they do.
  virtual std::string why_not_on(const Device&) const = 0;

  // Why no kernel can run a problem that the family computes; empty if one can.
  virtual std::string why_not(const Problem&) const = 0;

  // Why the problem cannot run under this plan, which is one of the family's; empty if it can.
  virtual std::string why_not_planned(const Problem&, const Plan&) const = 0;

  // Whether the plan's kernel reads rows of any length and address, so that nothing is copied for it.
  virtual bool reads_any_rows(const Plan&) const { return false; }

  // Whether the plan's kernel reads an fp32 weight as it lies, where other plans of its arithmetic read slices.
  virtual bool reads_weight(Arithmetic, const Plan&) const { return false; }

  // Why the plan's result is less accurate than the arithmetic promises; empty if it is not.
  virtual std::string why_not_accurate(const Problem&, const Plan&) const = 0;

  // Calls `visit` for every plan that may be the fastest. The problem can be run.
  virtual void for_each_candidate(const Problem&, const Visit& visit) const = 0;

  // The predicted time of any plan.
  virtual double microseconds(const Problem&, const Plan&) const = 0;

  // The plan of batch-invariant calls, which does not depend on M and does not split K. A fallback plan if the family
  // has none.
  virtual Plan invariant_plan(const Problem&) const { return {}; }

  // Bytes of problem.workspace that `launch` needs. A weight with a pack (problem.packed_weight) needs none.
  virtual int64_t workspace_bytes(const Problem&, const Plan&) const { return 0; }

  // The rows of D in each block whose column statistics the plan's kernel writes to problem.column_blocks, as
  // BlockMoments<float> [blocks][N] (csrc/reduce/moments.h). 0: it writes no moments, and does not read the pointer.
  virtual int moment_rows(const Problem&, const Plan&) const { return 0; }

  // Whether there are kernels of rows in groups.
  virtual bool takes_groups() const { return false; }

  // Whether the kernels store the second values of an epilogue that has them (csrc/open/contract.h), to problem.stored.
  virtual bool stores() const { return false; }

  // The open kernels of this plan, in the order of `launch`.
  virtual open::KernelNames kernels(const Problem&, const Plan&) const = 0;

  // For its arithmetic; the tiles of pairs if it is a pair; those that read a weight as it lies if it is readable.
  virtual int tile_count(const Problem&) const = 0;
  virtual TileText describe(const Problem&, int tile) const = 0;

  // A text that changes whenever a plan's numbers may stand for another kernel than before.
  virtual std::string fingerprint() const = 0;
};

const char* family_name(FamilyId id);  // "fallback" for PyTorch's GEMM
const Family& family_of(FamilyId id);  // not of the fallback

#define EPIGEMM_FAMILY(name) \
  namespace name {           \
  const Family& family();    \
  }
#include "gemm/families.def"
#undef EPIGEMM_FAMILY

}  // namespace epigemm
