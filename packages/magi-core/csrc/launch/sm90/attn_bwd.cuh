// Launcher of the backward kernel, and the registration that a file of one instantiation consists of.
#pragma once
#include <type_traits>

#include "launch/sm90/launch.h"
#include "launch/sm90/tensor_map.h"
#include "magi/attn/sm90_attn_bwd.cuh"

namespace magi::attn {

template <class T>
cudaError_t launch_bwd(BwdParams const& params, BwdTensors const& tensors, int num_ctas, cudaStream_t stream) {
  using Kernel = BwdKernel<T>;
  constexpr auto kElement =
      std::is_same_v<typename T::Element, __half> ? ElementType::kFloat16 : ElementType::kBfloat16;
  BwdMaps maps;
  if (auto e = make_tensor_map(&maps.q, kElement, tensors.q, T::kBlockM)) return e;
  if (auto e = make_tensor_map(&maps.dout, kElement, tensors.dout, T::kBlockM)) return e;
  if (auto e = make_tensor_map(&maps.k, kElement, tensors.k, T::kBlockN)) return e;
  if (auto e = make_tensor_map(&maps.v, kElement, tensors.v, T::kBlockN)) return e;
  if (auto e = make_row_map(&maps.rows, tensors.rows, params.dq.row_capacity, params.num_heads_q, T::kBlockM)) return e;
  constexpr int kSharedBytes = sizeof(typename Kernel::SharedStorage);
  if (auto e = cudaFuncSetAttribute(attn_bwd_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)) {
    return e;
  }
  attn_bwd_kernel<T><<<num_ctas, T::kThreads, kSharedBytes, stream>>>(params, maps);
  return cudaGetLastError();
}

template <class T>
struct BwdRegistration {
  BwdEntry entry;
  BwdRegistration()
      : entry{{std::is_same_v<typename T::Element, __half> ? ElementType::kFloat16 : ElementType::kBfloat16,
               T::kHeadDim, T::kHeadDimV, !T::Score::kIsIdentity},
              &launch_bwd<T>,
              bwd_entries()} {
    bwd_entries() = &entry;
  }
};

}  // namespace magi::attn
