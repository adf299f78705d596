// Four 8 x 8 matrices of 16-bit elements from registers to shared memory. PTX ISA 9.0, section 9.7.14.5.16 (stmatrix).
#pragma once
#include <cstdint>

namespace magi::ptx {

// Lane l gives the address of row l % 8 of matrix l / 8; register m of lane l is elements (l / 4, 2 * (l % 4)) of
// matrix m.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace magi::ptx
