// TMA descriptors of row-major matrices.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cutlass/numeric_types.h"
#include "gemm/sm90/tile.h"

namespace epigemm::sm90 {

template <class Element>
constexpr CUtensorMapDataType kMapType =
    sizeof(Element) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
inline constexpr CUtensorMapDataType kMapType<cutlass::half_t> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
inline constexpr CUtensorMapDataType kMapType<cutlass::bfloat16_t> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType kMapType<cutlass::tfloat32_t> = CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
// Boxes of `box_rows` rows and `box_bytes`, 128 or 64, swizzled so; what is beyond the matrix is read as zeros and not
// written. `row_stride` in elements; `promotion`: how much is loaded to L2 at once. False if the driver refuses.
inline bool encode(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data, int64_t row_stride,
                   int64_t rows, int64_t columns, int box_rows, int box_bytes,
                   CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride * element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes / element_bytes), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t element_strides[] = {1, 1};
  return cuTensorMapEncodeTiled(map, type, /*rank=*/2, const_cast<void*>(data), sizes, strides, box, element_strides,
                                CU_TENSOR_MAP_INTERLEAVE_NONE,
                                box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, promotion,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The same of `count` matrices that are `apart` elements apart, in boxes of one.
inline bool encode_several(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data,
                           int64_t row_stride, int64_t rows, int64_t columns, int64_t apart, int64_t count,
                           int box_rows) {
  constexpr int kBoxBytes = 128;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride * element_bytes),
                                static_cast<cuuint64_t>(apart * element_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kBoxBytes / element_bytes), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  return cuTensorMapEncodeTiled(map, type, /*rank=*/3, const_cast<void*>(data), sizes, strides, box, element_strides,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// A descriptor by which rows in groups are written, and none beyond the group of a tile: it has four dimensions, of
// which only the second one, with kGroupedRows rows, ends where an index may be. Row y of a group that ends at row e of
// the matrix has the index (kGroupedRows - e + y, e, kGroupedRows). The strides of the last two dimensions lead back to
// the row, since addresses are modulo 2^64: kGroupedRows * (2^34 - stride) = -kGroupedRows * stride.
inline bool encode_grouped(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data,
                           int64_t row_stride, int64_t columns, int box_rows, int box_bytes) {
  constexpr cuuint64_t kLargest = 0x7fff0000, kAround = cuuint64_t{1} << 34;
  const auto stride = static_cast<cuuint64_t>(row_stride * element_bytes);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), kGroupedRows, kLargest, kLargest};
  const cuuint64_t strides[] = {stride, stride, kAround - stride};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes / element_bytes), static_cast<cuuint32_t>(box_rows), 1,
                            1};
  const cuuint32_t element_strides[] = {1, 1, 1, 1};
  return cuTensorMapEncodeTiled(map, type, /*rank=*/4, const_cast<void*>(data), sizes, strides, box, element_strides,
                                CU_TENSOR_MAP_INTERLEAVE_NONE,
                                box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace epigemm::sm90
