#include "host/band.h"

#include <algorithm>
#include <tuple>

#include "host/mask.h"

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
  return shrink_wide(std::max(b.q0, q.begin), std::min(b.q1, q.end), std::max(b.k0, k.begin), std::min(b.k1, k.end),
                     b.lo, b.hi);
}

Band shift(Band const& b, int32_t dq, int32_t dk) {
  return {b.q0 + dq, b.q1 + dq, b.k0 + dk, b.k1 + dk, b.lo + dk - dq, b.hi + dk - dq};
}

Range columns(Band const& b, int32_t q) {
  if (q < b.q0 || q >= b.q1) return {0, 0};
  int64_t const begin = std::max<int64_t>(b.k0, int64_t{q} + b.lo);
  int64_t const end = std::min<int64_t>(b.k1, int64_t{q} + b.hi + 1);
  return begin < end ? Range{static_cast<int32_t>(begin), static_cast<int32_t>(end)} : Range{0, 0};
}

Band hull(Band const& a, Band const& b) {
  return shrink({std::min(a.q0, b.q0), std::max(a.q1, b.q1), std::min(a.k0, b.k0), std::max(a.k1, b.k1),
                 std::min(a.lo, b.lo), std::max(a.hi, b.hi)});
}

void append_slices(Band const& b, std::vector<Slice>& slices) {
  // A row's right limit follows the diagonal up to row `right` and is flat from there on; its left limit is flat
  // before row `left` and follows the diagonal from there on. The row where a limit meets the corner is both, so
  // either of two rows serves; the choice with the fewest intervals wins.
  auto const row = [&b](int64_t q) { return static_cast<int32_t>(std::clamp<int64_t>(q, b.q0, b.q1)); };
  int32_t const rights[2] = {row(int64_t{b.k1} - b.hi), row(int64_t{b.k1} - b.hi - 1)};
  int32_t const lefts[2] = {row(int64_t{b.k0} - b.lo), row(int64_t{b.k0} - b.lo + 1)};
  int best_count = 4;
  int32_t right = 0, left = 0;
  for (int32_t const r : rights) {
    for (int32_t const l : lefts) {
      int32_t const x = std::min(l, r), y = std::max(l, r);
      int const count = (x > b.q0) + (y > x) + (b.q1 > y);
      if (count < best_count) best_count = count, right = r, left = l;
    }
  }
  int32_t const cuts[4] = {b.q0, std::min(left, right), std::max(left, right), b.q1};
  for (int i = 0; i < 3; ++i) {
    int32_t const begin = cuts[i], end = cuts[i + 1];
    if (begin >= end) continue;
    bool const bounds_right = end <= right, bounds_left = begin >= left;
    int32_t const k0 = bounds_left ? begin + b.lo : b.k0, k1 = bounds_right ? end + b.hi : b.k1;
    slices.push_back({{begin, end}, {k0, k1}, static_cast<MaskType>(int{bounds_right} + 2 * int{bounds_left})});
  }
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
  if (std::vector<Band> normal; normal_form(bands, normal)) return normal;
  // Some pair is covered twice: bands are fused where they can be, and the list may depend on how it was written.
  // Disjoint bands whose union is a band have it as their hull, so equal areas tell; bands that touch by rows, by
  // columns or by diagonals are disjoint.
  auto const fuse = [&bands](auto const& order, auto const& touches) {
    std::sort(bands.begin(), bands.end(), [&](Band const& a, Band const& b) { return order(a) < order(b); });
    size_t kept = 0;
    for (size_t i = 1; i < bands.size(); ++i) {
      Band& a = bands[kept];
      Band const& b = bands[i];
      if (touches(a, b)) {
        Band const both = hull(a, b);
        if (area(both) == area(a) + area(b)) {
          a = both;
          continue;
        }
      }
      bands[++kept] = b;
    }
    size_t const before = bands.size();
    if (!bands.empty()) bands.resize(kept + 1);
    return bands.size() != before;
  };
  for (bool changed = true; changed;) {
    changed = fuse([](Band const& b) { return std::tie(b.q0, b.q1, b.k0, b.k1, b.lo); },
                   [](Band const& a, Band const& b) { return a.k1 == b.k0 || int64_t{a.hi} + 1 == b.lo; });
    changed |= fuse([](Band const& b) { return std::tie(b.k0, b.k1, b.q0, b.q1, b.lo); },
                    [](Band const& a, Band const& b) { return a.q1 == b.q0 || int64_t{a.hi} + 1 == b.lo; });
    changed |= fuse([](Band const& b) { return std::tie(b.hi, b.q0, b.k0, b.q1, b.k1, b.lo); },
                    [](Band const& a, Band const& b) { return a.q1 == b.q0 || a.k1 == b.k0; });
    changed |= fuse([](Band const& b) { return std::tie(b.lo, b.q0, b.k0, b.q1, b.k1, b.hi); },
                    [](Band const& a, Band const& b) { return a.q1 == b.q0 || a.k1 == b.k0; });
  }
  std::sort(bands.begin(), bands.end(), [](Band const& a, Band const& b) {
    return std::tie(a.q0, a.k0, a.q1, a.k1, a.lo, a.hi) < std::tie(b.q0, b.k0, b.q1, b.k1, b.lo, b.hi);
  });
  return bands;
}

uint64_t digest(std::span<Band const> bands, uint64_t seed) {
  // splitmix64 steps over the words in order; not for adversaries.
  uint64_t state = seed ^ (0x9E3779B97F4A7C15u * (bands.size() + 1));
  auto const mix = [&state](uint64_t word) {
    state += word + 0x9E3779B97F4A7C15u;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    state ^= state >> 31;
  };
  for (Band const& b : bands) {
    mix(uint64_t{static_cast<uint32_t>(b.q0)} << 32 | static_cast<uint32_t>(b.q1));
    mix(uint64_t{static_cast<uint32_t>(b.k0)} << 32 | static_cast<uint32_t>(b.k1));
    mix(uint64_t{static_cast<uint32_t>(b.lo)} << 32 | static_cast<uint32_t>(b.hi));
  }
  return state;
}

}  // namespace magi
