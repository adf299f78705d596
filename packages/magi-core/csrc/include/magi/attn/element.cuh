// 16-bit elements: rounding pairs of floats, and widening.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace magi::attn {

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// (low, high) rounded to nearest even into one register.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Clears the elements of a pair whose exponent is all ones (inf, NaN).
template <class Element>
__device__ __forceinline__ uint32_t clear_nonfinite(uint32_t pair);
template <>
__device__ __forceinline__ uint32_t clear_nonfinite<__nv_bfloat16>(uint32_t pair) {
  if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
  if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0x0000ffffu;
  return pair;
}
template <>
__device__ __forceinline__ uint32_t clear_nonfinite<__half>(uint32_t pair) {
  if ((pair & 0x7c00u) == 0x7c00u) pair &= 0xffff0000u;
  if ((pair & 0x7c000000u) == 0x7c000000u) pair &= 0x0000ffffu;
  return pair;
}

// A 4 x 4 transpose among the four lanes of a quad: register s of lane t becomes register t of lane s.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4]) {
  int const t = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if ((b & bit) != 0) continue;
      bool const upper = (t & bit) != 0;
      uint32_t const got = __shfl_xor_sync(0xffffffffu, upper ? r[b] : r[b + bit], bit);
      (upper ? r[b] : r[b + bit]) = got;
    }
  }
}

}  // namespace magi::attn
