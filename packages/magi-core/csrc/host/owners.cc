#include "host/owners.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

namespace magi {

int32_t Owners::num_local(int32_t rank) const {
  auto const mine = of(rank);
  return mine.empty() ? 0 : mine.back().local + mine.back().end - mine.back().begin;
}

size_t Owners::position_of(int32_t token) const {
  auto const found = std::upper_bound(by_begin.begin(), by_begin.end(), token,
                                      [this](int32_t t, int32_t i) { return t < runs[static_cast<size_t>(i)].end; });
  return static_cast<size_t>(found - by_begin.begin());
}

Owners make_owners(int32_t world_size, int32_t total, std::span<OwnerRow const> rows, char const* what) {
  using std::to_string;
  std::string const name = what;
  if (world_size < 1 || world_size > kMaxWorldSize) {
    throw std::invalid_argument(name + ": world_size must be at least 1 and at most " + to_string(kMaxWorldSize) +
                                ", got " + to_string(world_size));
  }
  if (total < 0) throw std::invalid_argument(name + ": total must not be negative, got " + to_string(total));
  Owners owners;
  owners.world_size = world_size;
  owners.total = total;
  std::vector<OwnerRow> sorted;
  sorted.reserve(rows.size());
  for (OwnerRow const& row : rows) {
    if (row.rank < 0 || row.rank >= world_size) {
      throw std::invalid_argument(name + ": rank must be in [0, " + to_string(world_size) + "), got " +
                                  to_string(row.rank));
    }
    if (row.begin > row.end || row.begin < 0 || row.end > total) {
      throw std::invalid_argument(name + ": range [" + to_string(row.begin) + ", " + to_string(row.end) + ") of rank " +
                                  to_string(row.rank) + " must lie inside [0, " + to_string(total) + ")");
    }
    if (row.begin < row.end) sorted.push_back(row);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](OwnerRow const& a, OwnerRow const& b) { return std::tie(a.rank, a.begin) < std::tie(b.rank, b.begin); });
  owners.offsets.assign(static_cast<size_t>(world_size) + 1, 0);
  for (OwnerRow const& row : sorted) {
    bool const joins = !owners.runs.empty() && owners.runs.back().rank == row.rank;
    if (joins && owners.runs.back().end == row.begin) {
      owners.runs.back().end = row.end;
      continue;
    }
    int32_t const local = joins ? owners.runs.back().local + owners.runs.back().end - owners.runs.back().begin : 0;
    owners.runs.push_back({row.begin, row.end, local, row.rank});
  }
  for (Run const& run : owners.runs) ++owners.offsets[static_cast<size_t>(run.rank) + 1];
  std::partial_sum(owners.offsets.begin(), owners.offsets.end(), owners.offsets.begin());
  owners.by_begin.resize(owners.runs.size());
  std::iota(owners.by_begin.begin(), owners.by_begin.end(), 0);
  std::sort(owners.by_begin.begin(), owners.by_begin.end(), [&](int32_t a, int32_t b) {
    return owners.runs[static_cast<size_t>(a)].begin < owners.runs[static_cast<size_t>(b)].begin;
  });
  int32_t expected = 0;
  for (int32_t const i : owners.by_begin) {
    Run const& run = owners.runs[static_cast<size_t>(i)];
    if (run.begin < expected) {
      throw std::invalid_argument(name + ": token " + to_string(run.begin) +
                                  " is owned more than once (again by rank " + to_string(run.rank) + ")");
    }
    if (run.begin > expected) throw std::invalid_argument(name + ": token " + to_string(expected) + " has no owner");
    expected = run.end;
  }
  if (expected != total) throw std::invalid_argument(name + ": token " + to_string(expected) + " has no owner");
  return owners;
}

std::vector<OwnerRow> rows_of_chunks(std::span<int32_t const> rank_of_chunk, int32_t chunk_size, int32_t total) {
  std::vector<OwnerRow> rows;
  rows.reserve(rank_of_chunk.size());
  int64_t begin = 0;
  for (int32_t const rank : rank_of_chunk) {
    int64_t const end = std::min<int64_t>(begin + chunk_size, total);
    rows.push_back({rank, static_cast<int32_t>(begin), static_cast<int32_t>(end)});
    begin = end;
  }
  return rows;
}

}  // namespace magi
