// Argument checks of the bindings. Each names the argument, what was expected and what came.
#pragma once
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

#include "launch/sm90/launch.h"

// Like TVM_FFI_CHECK, without the condition's text: the message is for the caller.
#define MAGI_CHECK(condition, Kind) \
  if (condition) {                  \
  } else                            \
    TVM_FFI_THROW(Kind)

namespace magi::binding {

namespace ffi = tvm::ffi;

inline std::string shape_text(ffi::TensorView t) {
  std::ostringstream text;
  text << '(';
  for (int i = 0; i < t.ndim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << ')';
  return text.str();
}

inline std::string dtype_text(DLDataType dtype) { return ffi::DLDataTypeToString(dtype); }

// First element. TensorView's own accessor leaves the byte offset to the caller.
inline void* data_of(ffi::TensorView t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }

inline void check_rank(char const* name, ffi::TensorView t, int rank) {
  MAGI_CHECK(t.ndim() == rank, ValueError) << name << " must have " << rank << " dimensions, got " << t.ndim();
}

inline void check_same_shape(char const* name, ffi::TensorView t, char const* other_name, ffi::TensorView other) {
  bool is_same = t.ndim() == other.ndim();
  for (int i = 0; is_same && i < t.ndim(); ++i) is_same = t.size(i) == other.size(i);
  MAGI_CHECK(is_same, ValueError) << name << " must have the shape of " << other_name << ' ' << shape_text(other)
                                  << ", got " << shape_text(t);
}

inline attn::ElementType element_of(char const* name, ffi::TensorView t) {
  DLDataType const dtype = t.dtype();
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kDLFloat) return attn::ElementType::kFloat16;
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kDLBfloat) return attn::ElementType::kBfloat16;
  if (dtype.lanes == 1 && dtype.code == kDLFloat && (dtype.bits == 32 || dtype.bits == 64)) {
    TVM_FFI_THROW(NotImplementedError) << name << " must be float16 or bfloat16 on CUDA, got " << dtype_text(dtype)
                                       << "; backend=\"reference\" serves float32 and float64";
  }
  TVM_FFI_THROW(TypeError) << name << " must be float16 or bfloat16, got " << dtype_text(dtype);
  return attn::ElementType::kBfloat16;
}

inline void check_dtype_of(char const* name, ffi::TensorView t, char const* other_name, ffi::TensorView other) {
  DLDataType const a = t.dtype(), b = other.dtype();
  MAGI_CHECK(a.code == b.code && a.bits == b.bits && a.lanes == b.lanes, TypeError)
      << name << " must have the dtype of " << other_name << " (" << dtype_text(b) << "), got " << dtype_text(a);
}

inline void check_dtype(char const* name, ffi::TensorView t, int code, int bits) {
  DLDataType const a = t.dtype();
  DLDataType const want{uint8_t(code), uint8_t(bits), 1};
  MAGI_CHECK(a.code == code && a.bits == bits && a.lanes == 1, TypeError)
      << name << " must be " << dtype_text(want) << ", got " << dtype_text(a);
}

inline void check_row_stats(char const* name, ffi::TensorView t, ffi::TensorView rows) {
  check_dtype(name, t, kDLFloat, 32);
  MAGI_CHECK(t.ndim() == 2 && t.size(0) == rows.size(0) && t.size(1) == rows.size(1), ValueError)
      << name << " must have shape (total_q, num_heads_q) = (" << rows.size(0) << ", " << rows.size(1) << "), got "
      << shape_text(t);
}

inline void check_last_dim_contiguous(char const* name, ffi::TensorView t) {
  int const last = t.ndim() - 1;
  MAGI_CHECK(t.stride(last) == 1 || t.size(last) <= 1, ValueError)
      << name << " must be contiguous in its last dim, got stride " << t.stride(last);
}

inline int cuda_device_of(char const* name, ffi::TensorView t) {
  MAGI_CHECK(t.device().device_type == kDLCUDA, ValueError) << name << " must be on a CUDA device";
  return t.device().device_id;
}

inline void check_device(char const* name, ffi::TensorView t, ffi::TensorView other) {
  MAGI_CHECK(t.device().device_type == other.device().device_type && t.device().device_id == other.device().device_id,
             ValueError)
      << name << " must be on cuda:" << other.device().device_id << ", got device type " << int(t.device().device_type)
      << ", index " << t.device().device_id;
}

template <class Strides>
void copy_strides(Strides& strides, ffi::TensorView t) {
  for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); ++i) strides[i] = t.stride(int(i));
}

// Whether every row of a 16-bit (token, head, dim) tensor can be read 16 bytes at a time.
inline bool has_wide_rows(ffi::TensorView t) {
  bool const aligned = reinterpret_cast<uintptr_t>(data_of(t)) % 16 == 0;
  return aligned && t.stride(2) == 1 && t.size(2) % 8 == 0 && (t.stride(0) % 8 == 0 || t.size(0) <= 1) &&
         (t.stride(1) % 8 == 0 || t.size(1) <= 1);
}

inline cudaStream_t stream_of(int device) { return static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device)); }

inline void check_status(char const* function, cudaError_t status) {
  MAGI_CHECK(status == cudaSuccess, RuntimeError) << function << ": " << cudaGetErrorString(status);
}

}  // namespace magi::binding
