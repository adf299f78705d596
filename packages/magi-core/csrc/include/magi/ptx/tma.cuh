// Bulk tensor copies. PTX ISA 9.0, section 9.7.9.27 (cp.async.bulk.tensor, cp.reduce.async.bulk).
#pragma once
#include <cuda.h>

#include <cstdint>

#include "magi/ptx/mbarrier.cuh"

namespace magi::ptx {

__device__ __forceinline__ void prefetch_tensor_map(CUtensorMap const* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// A box of a rank-3 tensor (dim, token, head) into shared memory; elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load_3d(void* smem, CUtensorMap const* map, uint64_t* barrier, int dim, int token,
                                            int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(dim), "r"(token), "r"(head)
      : "memory");
}

// Adds contiguous float32 words of shared memory to global memory. Both addresses and the size: multiples of 16 bytes.
__device__ __forceinline__ void bulk_reduce_add_f32(float* global, float const* smem, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(smem_address(smem)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's groups are incomplete; their writes are then visible to it.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace magi::ptx
