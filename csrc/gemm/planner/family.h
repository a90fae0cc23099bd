// A family of fused GEMM kernels, as the planner sees it. Free of CUDA: the same on a machine without a GPU.
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
  int shared_bytes = 0;  // of a CTA; 0: the family does not tell
};

class Family {
 public:
  using Visit = std::function<void(const Candidate&)>;

  virtual ~Family() = default;

  // Whether this family multiplies in the problem's arithmetic and element types.
  virtual bool computes(const Problem&) const = 0;

  // False of kernels that have not been run on the GPUs that they are for. They are no candidates: a caller names the
  // plan (csrc/call/forced.h), or asks for all families (Problem::is_any_family_offered).
  virtual bool is_offered() const { return true; }

  // Empty where the kernels run on the device.
  virtual std::string why_not_on(const Device&) const = 0;

  // Empty where a kernel can run a problem that the family computes; else the reason why not, in words.
  virtual std::string why_not(const Problem&) const = 0;

  // Empty where a kernel can run the problem under this plan, which is one of the family's.
  virtual std::string why_not_planned(const Problem&, const Plan&) const = 0;

  // Whether the plan's kernel reads rows of any length and address, so that nothing is copied for it.
  virtual bool reads_any_rows(const Plan&) const { return false; }

  // Empty where the plan's result is as accurate as the arithmetic promises.
  virtual std::string why_not_accurate(const Problem&, const Plan&) const = 0;

  // Calls `visit` for every plan worth a look. The problem can be run.
  virtual void for_each_candidate(const Problem&, const Visit& visit) const = 0;

  // The predicted time of a plan, whether it is worth a look or not.
  virtual double microseconds(const Problem&, const Plan&) const = 0;

  // The plan of batch-invariant calls, in which M decides nothing and K is not split. A fallback plan where the family
  // has none.
  virtual Plan invariant_plan(const Problem&) const { return {}; }

  // Bytes of problem.workspace that `launch` needs. A weight that is packed already (problem.packed_weight) takes none.
  virtual int64_t workspace_bytes(const Problem&) const { return 0; }

  // The open kernels that `launch` takes for this plan, in its order.
  virtual open::KernelNames kernels(const Problem&, const Plan&) const = 0;

  virtual int tile_count(const Problem&) const = 0;  // of its arithmetic, and of pairs where it is one
  virtual TileText describe(const Problem&, int tile) const = 0;

  // Changes whenever a plan's numbers may mean another kernel than before.
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
