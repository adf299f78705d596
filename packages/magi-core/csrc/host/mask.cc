#include "host/mask.h"

#include <algorithm>
#include <tuple>

namespace magi {
namespace {

bool before(Band const& a, Band const& b) {
  return std::tie(a.q0, a.k0, a.q1, a.k1, a.lo, a.hi) < std::tie(b.q0, b.k0, b.q1, b.k1, b.lo, b.hi);
}

// How the ends of a band's interval move from row q to row q + 1, inside a slab without events.
Range slopes_at(Band const& b, int32_t q) {
  return {int64_t{q} >= int64_t{b.k0} - b.lo ? 1 : 0, int64_t{q} < int64_t{b.k1} - b.hi - 1 ? 1 : 0};
}

}  // namespace

void RowLinker::close(Trace const& t) {
  int32_t const q1 = q_ + 1;
  int64_t const lo = t.left_moves ? int64_t{t.last.begin} - q_ : int64_t{t.first_begin} - q_;
  int64_t const hi = int64_t{t.first_end} - 1 - t.q0;
  bands_.push_back({t.q0, q1, t.first_begin, t.last.end, static_cast<int32_t>(lo), static_cast<int32_t>(hi)});
}

void RowLinker::row(int32_t q, std::span<Range const> intervals) {
  if (!open_.empty() && q != q_ + 1) {
    for (Trace const& t : open_) close(t);
    open_.clear();
  }
  next_.clear();
  size_t i = 0;
  for (Range const& r : intervals) {
    // An interval that begins elsewhere cannot continue a trace.
    while (i < open_.size() && open_[i].last.begin + 1 < r.begin) close(open_[i++]);
    if (i < open_.size() && open_[i].last.begin <= r.begin) {
      Trace t = open_[i];
      int32_t const left = r.begin - t.last.begin, right = r.end - t.last.end;
      if ((left == 1 || !t.left_moves) && (right == 0 || (right == 1 && !t.right_stays))) {
        t.left_moves |= left == 1;
        t.right_stays |= right == 0;
        t.last = r;
        next_.push_back(t);
        ++i;
        continue;
      }
      close(open_[i++]);
    }
    next_.push_back({q, r.begin, r.end, r, false, false});
  }
  for (; i < open_.size(); ++i) close(open_[i]);
  open_.swap(next_);
  q_ = q;
}

void RowLinker::rows(int32_t count, std::span<Range const> slopes) {
  if (count <= 0) return;
  for (size_t i = 0; i < open_.size(); ++i) {
    Trace& t = open_[i];
    int32_t const left = slopes[i].begin, right = slopes[i].end;
    int32_t moves = count;
    if ((left == 0 && t.left_moves) || (right == 1 && t.right_stays)) {
      close(t);
      t = {q_ + 1, t.last.begin + left, t.last.end + right, {t.last.begin + left, t.last.end + right}, false, false};
      --moves;
    }
    if (moves > 0) {
      t.left_moves |= left == 1;
      t.right_stays |= right == 0;
      t.last.begin += left * moves;
      t.last.end += right * moves;
    }
  }
  q_ += count;
}

std::vector<Band> RowLinker::finish() {
  for (Trace const& t : open_) close(t);
  open_.clear();
  std::sort(bands_.begin(), bands_.end(), before);
  return std::move(bands_);
}

bool normal_form(std::span<Band const> bands, std::vector<Band>& out) {
  // Rows at which some interval begins, ends, or changes how it moves.
  std::vector<int32_t> events, order(bands.size());
  events.reserve(4 * bands.size());
  for (size_t i = 0; i < bands.size(); ++i) {
    Band const& b = bands[i];
    order[i] = static_cast<int32_t>(i);
    events.insert(events.end(), {b.q0, b.q1});
    for (int64_t const q : {int64_t{b.k0} - b.lo, int64_t{b.k1} - b.hi - 1}) {
      if (b.q0 < q && q < b.q1) events.push_back(static_cast<int32_t>(q));
    }
  }
  std::sort(events.begin(), events.end());
  events.erase(std::unique(events.begin(), events.end()), events.end());
  auto const at = [&bands](int32_t i) -> Band const& { return bands[static_cast<size_t>(i)]; };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return before(at(a), at(b)); });

  RowLinker linker;
  std::vector<int32_t> live, merged;  // bands of the slab by column: disjoint ones never change places
  std::vector<Range> intervals, slopes;
  size_t next = 0;
  for (size_t e = 0; e + 1 < events.size(); ++e) {
    int32_t const begin = events[e], end = events[e + 1];
    std::erase_if(live, [&](int32_t i) { return at(i).q1 <= begin; });
    size_t const first_new = next;
    while (next < order.size() && at(order[next]).q0 == begin) ++next;
    if (next > first_new) {
      auto const from = order.begin() + static_cast<ptrdiff_t>(first_new),
                 to = order.begin() + static_cast<ptrdiff_t>(next);
      auto const by_column = [&](int32_t a, int32_t b) {
        return columns(at(a), begin).begin < columns(at(b), begin).begin;
      };
      std::sort(from, to, by_column);
      merged.clear();
      std::merge(live.begin(), live.end(), from, to, std::back_inserter(merged), by_column);
      live.swap(merged);
    }
    if (live.empty()) continue;

    // Two neighbours that touch in the slab's first row only are one interval there and two below. They cannot touch in
    // its last row only: a gap that closes has a moving end on its left, and a shrunk band's ends stop at an event.
    bool first_apart = false;
    for (size_t i = 0; i + 1 < live.size(); ++i) {
      Band const &a = at(live[i]), &b = at(live[i + 1]);
      int32_t const gap = columns(b, begin).begin - columns(a, begin).end;
      int32_t const last_gap = columns(b, end - 1).begin - columns(a, end - 1).end;
      if (gap < 0 || last_gap < 0) return false;
      first_apart |= gap == 0 && last_gap != 0;
    }
    int32_t const cuts[3] = {begin, first_apart ? begin + 1 : begin, end};
    for (int c = 0; c < 2; ++c) {
      int32_t const from = cuts[c], to = cuts[c + 1];
      if (from >= to) continue;
      intervals.clear();
      slopes.clear();
      for (int32_t const i : live) {
        Range const r = columns(at(i), from), s = slopes_at(at(i), from);
        // Two neighbours that touch in the first row of what is left touch in all its rows.
        if (!intervals.empty() && intervals.back().end == r.begin) {
          intervals.back().end = r.end;
          slopes.back().end = s.end;
        } else {
          intervals.push_back(r);
          slopes.push_back(s);
        }
      }
      linker.row(from, intervals);
      linker.rows(to - from - 1, slopes);
    }
  }
  out = linker.finish();
  return true;
}

std::vector<int64_t> density(std::span<Band const> bands, int32_t total_q, int32_t total_k, int32_t rows,
                             int32_t cols) {
  std::vector<int64_t> out(static_cast<size_t>(int64_t{rows} * cols));
  auto const edge = [](int64_t total, int64_t i, int64_t n) { return static_cast<int32_t>(total * i / n); };
  auto const cell_of = [](int64_t x, int64_t total, int64_t n) { return std::clamp<int64_t>(x * n / total, 0, n - 1); };
  if (total_q <= 0 || total_k <= 0) return out;
  for (Band const& b : bands) {
    for (int64_t r = cell_of(b.q0, total_q, rows); r < rows && edge(total_q, r, rows) < b.q1; ++r) {
      Range const q{edge(total_q, r, rows), edge(total_q, r + 1, rows)};
      Band const strip = clip(b, q, {0, total_k});
      if (is_empty(strip)) continue;
      for (int64_t c = cell_of(strip.k0, total_k, cols); c < cols && edge(total_k, c, cols) < strip.k1; ++c) {
        out[static_cast<size_t>(r * cols + c)] +=
            area(clip(strip, q, {edge(total_k, c, cols), edge(total_k, c + 1, cols)}));
      }
    }
  }
  return out;
}

}  // namespace magi
