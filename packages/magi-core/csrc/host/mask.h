// Masks by rows: the normal form of bands that depends on nothing but the visible cells, and bands of dense masks.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"

namespace magi {

// An interval followed from row to row while all of it is one band.
struct Trace {
  int32_t q0, first_begin, first_end;  // first row and its interval
  Range last;
  bool left_moves = false, right_stays = false;

  // Whether the same band holds `next` in the next row.
  bool goes_on(Range const& next) const;
  void append(Range const& next);
  // The band down to row q, that of `last`.
  Band band(int32_t q) const;
};

// Links the maximal column intervals of consecutive rows into bands, greedily from the top. An interval continues the
// one above when the two are still one band: the left end stays, then moves by one column a row; the right end moves by
// one column a row, then stays. No two intervals compete for a continuation, so the result is a function of the cells.
class RowLinker {
 public:
  // Intervals of row q: ascending, with gaps between. Rows ascend; a skipped row sees nothing.
  void row(int32_t q, std::span<Range const> intervals);

  // All bands, sorted by (q0, k0).
  std::vector<Band> finish();

 private:
  void close(Trace const& trace) { bands_.push_back(trace.band(q_)); }

  int32_t q_ = 0;  // the last row
  std::vector<Trace> open_, next_;
  std::vector<Band> bands_;
};

// The normal form of disjoint shrunk bands. False, with `out` unspecified, when two of them share a cell.
bool normal_form(std::span<Band const> bands, std::vector<Band>& out);

// Visible cells in each cell of a (rows, cols) picture of [0, total_q) x [0, total_k), row-major.
std::vector<int64_t> density(std::span<Band const> bands, int32_t total_q, int32_t total_k, int32_t rows, int32_t cols);

}  // namespace magi
