// Bands: the one form of every mask on the host. All arithmetic is exact; areas are 64-bit.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
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

// A rectangle of query rows and key columns with a public mask type.
struct Slice {
  Range q, k;
  MaskType type;
};

// The band of a slice, shrunk to its visible cells; is_empty() of it is true when it has none.
Band band_of_slice(Range q, Range k, MaskType type);

bool is_empty(Band const& band);

// Shrinks rectangle and diagonals to the visible cells: afterwards every edge row and column of the rectangle has a
// visible cell, and so have the diagonals lo and hi. An empty band becomes all zeros.
Band shrink(Band band);

// The part of `band` inside q x k, shrunk.
Band clip(Band const& band, Range q, Range k);

// The same cells after moving rows by dq and columns by dk. The caller sees to it that nothing leaves int32.
Band shift(Band const& band, int32_t dq, int32_t dk);

// Number of visible cells, in closed form.
int64_t area(Band const& band);

// Visible columns of row q: [max(k0, q + lo), min(k1, q + hi + 1)), empty outside [q0, q1).
Range columns(Band const& band, int32_t q);

// The smallest band that holds both (non-empty, shrunk) bands.
Band hull(Band const& a, Band const& b);

// Appends the fewest row intervals, each a slice of a public type, that together are the band: at most three.
void append_slices(Band const& band, std::vector<Slice>& slices);

// The same cells as bands sorted by (q0, k0). Of disjoint bands it is a function of the cells alone (mask.h), so equal
// masks are equal lists. When a pair is covered twice, touching bands whose union is a band are fused, no more.
std::vector<Band> canonical(std::vector<Band> bands);

// 64-bit digest of a list of bands as they stand.
uint64_t digest(std::span<Band const> bands, uint64_t seed = 0);

}  // namespace magi
