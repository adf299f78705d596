// Warpgroup matrix multiply, float32 accumulators. PTX ISA 9.0, section 9.7.15 (wgmma), descriptors section 9.7.15.5.
//
// Shared-memory operands lie in 128-byte swizzled blocks, as the copy engine writes boxes of 64 16-bit elements:
// a block is [rows][64], rows 128 bytes apart, and wider matrices are blocks one after another.
//   K-major operand (the 64 elements run along k):   8-row groups are 1024 bytes apart along M or N.
//   MN-major operand (the 64 elements run along M/N): 8-row groups are 1024 bytes apart along k, blocks along M/N.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "magi/ptx/mbarrier.cuh"

namespace magi::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of registers across the point where the tensor cores own them.
template <int N>
__device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void wgmma_pin(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptor of a block at a shared address (1024-byte aligned pattern). block_bytes: distance of blocks along M/N,
// which only MN-major operands read.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t block_bytes = 16) {
  uint64_t const swizzle_128b = uint64_t(1) << 62, group_stride = uint64_t(1024 >> 4) << 32;
  return swizzle_128b | group_stride | (uint64_t(block_bytes >> 4) << 16) | uint64_t((address & 0x3ffff) >> 4);
}

// m64 x N x k16. kTrans: the operand is MN-major.
template <class Element, int N>
struct Wgmma;

#include "magi/ptx/wgmma_shapes.inc"

}  // namespace magi::ptx
