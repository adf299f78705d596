// Exports of the band algebra. Arrays are int32 CPU tensors, C-contiguous.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "host/band.h"

namespace ffi = tvm::ffi;

namespace magi::binding {
namespace {

// A zero-row tensor may come with a null pointer; nothing is read then.
Band const* bands_of(ffi::TensorView bands) {
  if (bands.ndim() != 2 || bands.size(1) != plan::kBandWords) {
    TVM_FFI_THROW(ValueError) << "bands must have shape (num_bands, " << plan::kBandWords << ")";
  }
  return static_cast<Band const*>(bands.data_ptr());
}

int64_t bands_area(ffi::TensorView bands) {
  Band const* const b = bands_of(bands);
  int64_t sum = 0;
  for (int64_t i = 0; i < bands.size(0); ++i) sum += area(b[i]);
  return sum;
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_area, magi::binding::bands_area);
