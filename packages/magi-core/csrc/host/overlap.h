// Double cover: pairs of bands that show a cell in common.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "host/band.h"

namespace magi {

// The cells that both bands show: again a band, all zeros when there are none.
Band intersect(Band const& a, Band const& b);

// Up to `limit` pairs (i < j) of non-empty shrunk bands that share a cell, in a fixed order. Sorts by rows, then sweeps
// over them with the columns of the live bands in a segment tree: O((n + r) log n), r pairs of rectangles that meet.
std::vector<std::pair<int32_t, int32_t>> find_overlaps(std::span<Band const> bands, size_t limit);

}  // namespace magi
