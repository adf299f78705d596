// Arrays across the host boundary: numpy arrays come in as TensorView, results go out as CPU tensors.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

namespace magi::binding {

struct HostAlloc {
  // One byte at least, so that an empty array never carries a null pointer.
  void AllocData(DLTensor* tensor) { tensor->data = std::malloc(tvm::ffi::GetDataSize(*tensor) + 1); }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

template <class T>
constexpr DLDataType dtype_of() {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 1);
  return {kDLInt, static_cast<uint8_t>(8 * sizeof(T)), 1};
}

// A copy of `data` as an array of that shape.
template <class T>
tvm::ffi::Tensor array_of(T const* data, std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (int64_t const n : shape) count *= n;
  auto tensor =
      tvm::ffi::Tensor::FromNDAlloc(HostAlloc(), tvm::ffi::ShapeView(shape), dtype_of<T>(), DLDevice{kDLCPU, 0});
  if (count > 0) std::memcpy(tensor.data_ptr(), data, static_cast<size_t>(count) * sizeof(T));
  return tensor;
}

template <class T>
tvm::ffi::Tensor array_of(std::vector<T> const& data) {
  return array_of(data.data(), {static_cast<int64_t>(data.size())});
}

// Refuses anything but a C-contiguous CPU array of T with `ndim` dims.
template <class T>
T* checked_array(tvm::ffi::TensorView array, int ndim, char const* name) {
  DLDataType const want = dtype_of<T>(), got = array.dtype();
  if (got.code != want.code || got.bits != want.bits || got.lanes != 1) {
    TVM_FFI_THROW(TypeError) << name << " must be int" << int{want.bits} << ", got a dtype of code " << int{got.code}
                             << " with " << int{got.bits} << " bits";
  }
  if (array.device().device_type != kDLCPU) TVM_FFI_THROW(ValueError) << name << " must be on the CPU";
  if (array.ndim() != ndim) {
    TVM_FFI_THROW(ValueError) << name << " must have " << ndim << " dims, got " << array.ndim();
  }
  if (!array.IsContiguous()) TVM_FFI_THROW(ValueError) << name << " must be C-contiguous";
  return static_cast<T*>(array.data_ptr());
}

}  // namespace magi::binding
