#include "host/band.h"

#include <algorithm>
#include <tuple>

namespace magi {
namespace {

constexpr Band kEmpty{0, 0, 0, 0, 0, 0};

// Diagonals are sums of two int32; they are narrowed only once they lie inside the rectangle.
Band shrink_wide(int64_t q0, int64_t q1, int64_t k0, int64_t k1, int64_t lo, int64_t hi) {
  if (q0 >= q1 || k0 >= k1) return kEmpty;
  lo = std::max(lo, k0 - (q1 - 1));
  hi = std::min(hi, k1 - 1 - q0);
  if (lo > hi) return kEmpty;
  // Row q sees columns iff q + lo <= k1 - 1 and q + hi >= k0; column k is seen iff k - hi <= q1 - 1 and k - lo >= q0.
  q0 = std::max(q0, k0 - hi);
  q1 = std::min(q1, k1 - lo);
  k0 = std::max(k0, q0 + lo);
  k1 = std::min(k1, q1 + hi);
  if (q0 >= q1 || k0 >= k1) return kEmpty;
  lo = std::max(lo, k0 - (q1 - 1));
  hi = std::min(hi, k1 - 1 - q0);
  return {static_cast<int32_t>(q0), static_cast<int32_t>(q1), static_cast<int32_t>(k0),
          static_cast<int32_t>(k1), static_cast<int32_t>(lo), static_cast<int32_t>(hi)};
}

}  // namespace

bool is_empty(Band const& band) { return band.q0 >= band.q1 || band.k0 >= band.k1 || band.lo > band.hi; }

Band shrink(Band b) { return shrink_wide(b.q0, b.q1, b.k0, b.k1, b.lo, b.hi); }

Band band_of_slice(Range q, Range k, MaskType type) {
  bool const bounds_right = type == MaskType::kCausal || type == MaskType::kBiCausal;
  bool const bounds_left = type == MaskType::kInvCausal || type == MaskType::kBiCausal;
  int64_t const open = int64_t{1} << 40;
  int64_t const hi = bounds_right ? int64_t{k.end} - q.end : open;
  int64_t const lo = bounds_left ? int64_t{k.begin} - q.begin : -open;
  return shrink_wide(q.begin, q.end, k.begin, k.end, lo, hi);
}

Band clip(Band const& b, Range q, Range k) {
  return shrink_wide(std::max(b.q0, q.begin), std::min(b.q1, q.end), std::max(b.k0, k.begin),
                     std::min(b.k1, k.end), b.lo, b.hi);
}

Band shift(Band const& b, int32_t dq, int32_t dk) {
  return {b.q0 + dq, b.q1 + dq, b.k0 + dk, b.k1 + dk, b.lo + dk - dq, b.hi + dk - dq};
}

Range columns(Band const& b, int32_t q) {
  if (q < b.q0 || q >= b.q1) return {0, 0};
  int32_t const begin = std::max(b.k0, q + b.lo), end = std::min(b.k1, q + b.hi + 1);
  return begin < end ? Range{begin, end} : Range{0, 0};
}

int64_t area(Band const& band) {
  Band const b = shrink(band);
  if (is_empty(b)) return 0;
  // The rectangle less the triangle cut off above the upper diagonal and the one below the lower diagonal. After
  // shrinking the two cannot overlap, and neither is larger than the rectangle's smaller side.
  int64_t const rows = b.q1 - b.q0, cols = b.k1 - b.k0;
  int64_t const right = (int64_t{b.k1} - 1 - b.q0) - b.hi, left = b.lo - (int64_t{b.k0} - (b.q1 - 1));
  auto const triangle = [](int64_t n) { return n * (n + 1) / 2; };
  return rows * cols - triangle(right) - triangle(left);
}

std::vector<Band> canonical(std::vector<Band> bands) {
  for (Band& b : bands) b = shrink(b);
  std::erase_if(bands, is_empty);
  auto const by_rows = [](Band const& b) { return std::tie(b.lo, b.hi, b.k0, b.k1, b.q0, b.q1); };
  auto const by_columns = [](Band const& b) { return std::tie(b.lo, b.hi, b.q0, b.q1, b.k0, b.k1); };
  // Two bands of equal diagonals fuse when together they are one rectangle cut by those diagonals.
  auto const fuse = [&bands](auto const& order, auto const& joins, auto const& join) {
    std::sort(bands.begin(), bands.end(), [&](Band const& a, Band const& b) { return order(a) < order(b); });
    size_t kept = 0;
    for (size_t i = 1; i < bands.size(); ++i) {
      if (joins(bands[kept], bands[i])) join(bands[kept], bands[i]);
      else bands[++kept] = bands[i];
    }
    size_t const before = bands.size();
    if (!bands.empty()) bands.resize(kept + 1);
    return bands.size() != before;
  };
  for (bool changed = true; changed;) {
    changed = fuse(
        by_rows,
        [](Band const& a, Band const& b) {
          return a.lo == b.lo && a.hi == b.hi && a.k0 == b.k0 && a.k1 == b.k1 && a.q1 == b.q0;
        },
        [](Band& a, Band const& b) { a.q1 = b.q1; });
    changed |= fuse(
        by_columns,
        [](Band const& a, Band const& b) {
          return a.lo == b.lo && a.hi == b.hi && a.q0 == b.q0 && a.q1 == b.q1 && a.k1 == b.k0;
        },
        [](Band& a, Band const& b) { a.k1 = b.k1; });
  }
  std::sort(bands.begin(), bands.end(), [](Band const& a, Band const& b) {
    return std::tie(a.q0, a.k0, a.q1, a.k1, a.lo, a.hi) < std::tie(b.q0, b.k0, b.q1, b.k1, b.lo, b.hi);
  });
  return bands;
}

}  // namespace magi
