// Bands across the host boundary: arrays (num_bands, 6) int32 come in as spans.
#pragma once
#include <cstdint>
#include <span>

#include "binding/host_arrays.h"
#include "host/band.h"

namespace magi::binding {

// The bands of an array; refuses another dtype, device or shape.
inline std::span<Band const> bands_of(tvm::ffi::TensorView bands) {
  auto const* const words = checked_array<int32_t>(bands, 2, "bands");
  if (bands.size(1) != plan::kBandWords) {
    TVM_FFI_THROW(ValueError) << "bands must have shape (num_bands, " << plan::kBandWords << "), got (" << bands.size(0)
                              << ", " << bands.size(1) << ")";
  }
  return {reinterpret_cast<Band const*>(words), static_cast<size_t>(bands.size(0))};
}

}  // namespace magi::binding
