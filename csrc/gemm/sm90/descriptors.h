// TMA descriptors that a thread has had before: the driver is asked to make one once, and then only to put another
// address into it. Free of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm/planner/hash.h"

namespace epigemm::sm90 {

// All that a descriptor is made of besides the address. Beyond `rank` the arrays are zero.
struct DescriptorShape {
  static constexpr uint32_t kMostRank = 5;

  int64_t sizes[kMostRank] = {};    // elements, the innermost first
  int64_t strides[kMostRank] = {};  // bytes, from the second dimension on
  uint32_t box[kMostRank] = {};
  uint32_t element_strides[kMostRank] = {};
  uint32_t rank = 0;
  uint32_t type = 0, interleave = 0, swizzle = 0, promotion = 0, fill = 0;
};
static_assert(std::has_unique_object_representations_v<DescriptorShape>, "compared byte by byte");

inline bool operator==(DescriptorShape const& a, DescriptorShape const& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// One thread's, a slot for each hash. A descriptor is the same on every device that these kernels run on, and no
// memory's lifetime has a part in it: it is a function of its shape and address.
template <class Map>
class DescriptorCache {
 public:
  static constexpr std::size_t kSlots = 64;

  // encode(map, address) makes a descriptor of this shape, replace(map, address) changes its address; both return zero
  // when done. What `encode` refused is not kept.
  template <class Encode, class Replace>
  auto get(Map* map, DescriptorShape const& shape, void* address, Encode encode, Replace replace)
      -> decltype(encode(map, address)) {
    Slot& slot = slots_[index_of(shape)];
    const bool is_kept = slot.shape == shape;
    if (!is_kept || (slot.address != address && replace(&slot.map, address))) {
      if (const auto refused = encode(&slot.map, address)) {
        slot = Slot{};
        return refused;
      }
      slot.shape = shape;
    }
    slot.address = address;
    *map = slot.map;
    return {};
  }

 private:
  struct Slot {
    Map map{};
    DescriptorShape shape;  // rank 0: empty
    void* address = nullptr;
  };

  // Of what tells one program's descriptors apart: the comparison does the rest.
  static std::size_t index_of(DescriptorShape const& shape) {
    const int64_t box = static_cast<int64_t>(shape.box[0]) << 32 | shape.box[1];
    return hash_of({shape.sizes[0], shape.sizes[1], shape.strides[0], box, shape.type}) % kSlots;
  }

  Slot slots_[kSlots];
};

}  // namespace epigemm::sm90
