// Launcher of the forward kernel, and the macro that a file of one instantiation consists of.
#pragma once
#include <type_traits>

#include "launch/sm90/launch.h"
#include "launch/sm90/tensor_map.h"
#include "magi/attn/sm90_attn_fwd.cuh"

namespace magi::attn {

template <class T>
cudaError_t launch_fwd(FwdParams const& params, FwdTensors const& tensors, int num_ctas, cudaStream_t stream) {
  using Kernel = FwdKernel<T>;
  constexpr auto kElement =
      std::is_same_v<typename T::Element, __half> ? ElementType::kFloat16 : ElementType::kBfloat16;
  FwdMaps maps;
  if (auto e = make_tensor_map(&maps.q, kElement, tensors.q, T::kBlockM)) return e;
  if (auto e = make_tensor_map(&maps.k, kElement, tensors.k, T::kBlockN)) return e;
  if (auto e = make_tensor_map(&maps.v, kElement, tensors.v, T::kBlockN)) return e;
  constexpr int kSharedBytes = sizeof(typename Kernel::SharedStorage);
  // Not cached: the attribute belongs to the current device, and setting it costs under a microsecond.
  if (auto e = cudaFuncSetAttribute(attn_fwd_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)) {
    return e;
  }
  attn_fwd_kernel<T><<<num_ctas, T::kThreads, kSharedBytes, stream>>>(params, maps);
  return cudaGetLastError();
}

template <class T>
struct FwdRegistration {
  FwdEntry entry;
  FwdRegistration()
      : entry{{std::is_same_v<typename T::Element, __half> ? ElementType::kFloat16 : ElementType::kBfloat16,
               T::kHeadDim, T::kHeadDimV, !T::Score::kIsIdentity},
              &launch_fwd<T>,
              fwd_entries()} {
    fwd_entries() = &entry;
  }
};

}  // namespace magi::attn
