// Tensor maps for the copy engine, made through the driver's entry point: nothing links libcuda.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "launch/sm90/launch.h"

namespace magi::attn {

inline auto tensor_map_encoder() {
  static auto const encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return encode;
}

// A 16-bit (token, head, dim) tensor, read in boxes of 64 dims x rows tokens, 128-byte swizzled, zeros outside.
inline cudaError_t make_tensor_map(CUtensorMap* map, ElementType element, TokenTensor const& t, int rows) {
  auto const encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  auto const stride = [&](int64_t extent, int64_t elements) { return extent > 1 ? uint64_t(elements) * 2 : 16; };
  cuuint64_t const sizes[3] = {cuuint64_t(t.dim), cuuint64_t(t.tokens > 0 ? t.tokens : 1), cuuint64_t(t.heads)};
  cuuint64_t const strides[2] = {stride(t.tokens, t.strides[0]), stride(t.heads, t.strides[1])};
  cuuint32_t const box[3] = {64, cuuint32_t(rows), 1}, steps[3] = {1, 1, 1};
  CUresult const status =
      encode(map, element == ElementType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             3, const_cast<void*>(t.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Float32 (head, row, 4), read in boxes of `rows` rows of a head.
inline cudaError_t make_row_map(CUtensorMap* map, float const* data, int capacity, int heads, int rows) {
  auto const encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t const sizes[3] = {4, cuuint64_t(capacity), cuuint64_t(heads)};
  cuuint64_t const strides[2] = {16, cuuint64_t(capacity) * 16};
  cuuint32_t const box[3] = {4, cuuint32_t(rows), 1}, steps[3] = {1, 1, 1};
  CUresult const status = encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, const_cast<float*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace magi::attn
