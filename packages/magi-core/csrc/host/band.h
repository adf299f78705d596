// Bands: the one form of every mask on the host. All arithmetic is exact; areas are 64-bit.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "magi/plan_format.h"

namespace magi {

using plan::Band;

enum class MaskType : int32_t { kFull = 0, kCausal = 1, kInvCausal = 2, kBiCausal = 3 };

// Half-open interval of tokens.
struct Range {
  int32_t begin, end;
  constexpr int32_t length() const { return end - begin; }
  constexpr bool is_empty() const { return begin >= end; }
  friend bool operator==(Range const&, Range const&) = default;
};

// The band of a slice, shrunk to its visible cells; empty() of it is true when it has none.
Band band_of_slice(Range q, Range k, MaskType type);

bool is_empty(Band const& band);

// Shrinks rectangle and diagonals to the visible cells: afterwards every edge row and column of the rectangle has a
// visible cell, lo >= k0 - (q1 - 1) and hi <= k1 - 1 - q0. An empty band becomes all zeros.
Band shrink(Band band);

// The part of `band` inside q x k, shrunk.
Band clip(Band const& band, Range q, Range k);

// The same cells after moving rows by dq and columns by dk.
Band shift(Band const& band, int32_t dq, int32_t dk);

// Number of visible cells, in closed form.
int64_t area(Band const& band);

// Visible columns of row q: [max(k0, q + lo), min(k1, q + hi + 1)), empty outside [q0, q1).
Range columns(Band const& band, int32_t q);

// Drops empty bands, fuses touching ones of equal diagonals, sorts by (q0, k0): equal lists have equal digests.
std::vector<Band> canonical(std::vector<Band> bands);

}  // namespace magi
