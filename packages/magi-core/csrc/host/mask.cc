#include "host/mask.h"

#include <algorithm>
#include <set>
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

Band Trace::band(int32_t q) const {
  int64_t const lo = left_moves ? int64_t{last.begin} - q : int64_t{first_begin} - q;
  int64_t const hi = int64_t{first_end} - 1 - q0;
  return {q0, q + 1, first_begin, last.end, static_cast<int32_t>(lo), static_cast<int32_t>(hi)};
}

bool Trace::goes_on(Range const& next) const {
  int32_t const left = next.begin - last.begin, right = next.end - last.end;
  return (left == 1 || (left == 0 && !left_moves)) && (right == 0 || (right == 1 && !right_stays));
}

void Trace::append(Range const& next) {
  left_moves |= next.begin != last.begin;
  right_stays |= next.end == last.end;
  last = next;
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
      if (t.goes_on(r)) {
        t.append(r);
        next_.push_back(t);
        ++i;
        continue;
      }
      close(open_[i++]);
    }
    next_.push_back({q, r.begin, r.end, r});
  }
  for (; i < open_.size(); ++i) close(open_[i]);
  open_.swap(next_);
  q_ = q;
}

std::vector<Band> RowLinker::finish() {
  for (Trace const& t : open_) close(t);
  open_.clear();
  std::sort(bands_.begin(), bands_.end(), before);
  return std::move(bands_);
}

namespace {

// The normal form by a sweep over rows in which only what changes is looked at: O(n log n) of n bands, however many of
// them are live at once.
//
// Live bands lie in a set by column: disjoint ones never change places. Neighbours that touch are joined, and a run of
// joined bands is one interval of the row, kept under its first band. Rows matter where a band begins, ends or changes
// how it moves (an event), and one below a row in which two bands touch that part from there. In between, intervals
// move by their slopes and their traces are brought up to date when they are next looked at.
class Sweep {
 public:
  explicit Sweep(std::span<Band const> bands)
      : bands_(bands),
        live_(ByColumn{this}),
        heads_(ByColumn{this}),
        where_(bands.size()),
        groups_(bands.size()),
        is_joined_(bands.size()),
        mark_(bands.size(), -1) {}

  // False when two bands share a cell.
  bool run(std::vector<Band>& out) {
    std::vector<Event> events;
    events.reserve(4 * bands_.size());
    for (size_t n = 0; n < bands_.size(); ++n) {
      Band const& b = bands_[n];
      int32_t const i = static_cast<int32_t>(n);
      events.push_back({b.q0, kBegin, i});
      events.push_back({b.q1, kEnd, i});
      for (int64_t const q : {int64_t{b.k0} - b.lo, int64_t{b.k1} - b.hi - 1}) {
        if (b.q0 < q && q < b.q1) events.push_back({static_cast<int32_t>(q), kTurn, i});
      }
    }
    std::sort(events.begin(), events.end(), [](Event const& a, Event const& b) {
      return std::tie(a.q, a.kind, a.band) < std::tie(b.q, b.kind, b.band);
    });
    for (size_t next = 0; next < events.size() || !parting_.empty();) {
      int32_t const q = !parting_.empty() ? parting_row_ : events[next].q;
      size_t const first = next;
      while (next < events.size() && events[next].q == q) ++next;
      if (!row(q, std::span(events).subspan(first, next - first))) return false;
    }
    std::sort(done_.begin(), done_.end(), before);
    out = std::move(done_);
    return true;
  }

 private:
  enum Kind : int32_t { kEnd, kTurn, kBegin };
  struct Event {
    int32_t q;
    Kind kind;
    int32_t band;
  };
  struct ByColumn {
    Sweep const* sweep;
    bool operator()(int32_t a, int32_t b) const {
      return columns(sweep->at(a), sweep->now_).begin < columns(sweep->at(b), sweep->now_).begin;
    }
  };
  using Set = std::set<int32_t, ByColumn>;
  struct Group {  // an interval, as of row `q`
    Trace trace;
    int32_t q, last_band;
    Range slopes;
  };

  Band const& at(int32_t i) const { return bands_[static_cast<size_t>(i)]; }
  Group& group(int32_t i) { return groups_[static_cast<size_t>(i)]; }
  Set::iterator& where(int32_t i) { return where_[static_cast<size_t>(i)]; }
  int32_t before_of(int32_t i) { return where(i) == live_.begin() ? -1 : *std::prev(where(i)); }
  int32_t after_of(int32_t i) { return std::next(where(i)) == live_.end() ? -1 : *std::next(where(i)); }

  // The first row below q in which a live band ends or changes how it moves.
  static int64_t next_event(Band const& b, int32_t q) {
    int64_t next = b.q1;
    for (int64_t const turn : {int64_t{b.k0} - b.lo, int64_t{b.k1} - b.hi - 1}) {
      if (turn > q) next = std::min(next, turn);
    }
    return next;
  }

  // Takes the group that holds a live band apart, if that has not been done in this row: its members are to be grouped
  // anew, its trace to be continued or closed.
  void open_group_of(int32_t band) {
    auto head = heads_.upper_bound(band);
    if (head == heads_.begin()) return;
    --head;
    int32_t const first = *head;
    if (first != band && live_.key_comp()(group(first).last_band, band)) return;  // the group of another band
    advance(group(first), row_ - 1);
    old_.push_back(group(first).trace);
    opened_.push_back(first);
    heads_.erase(head);
  }

  // Lets the interval of a group move by its slopes up to row q.
  void advance(Group& g, int32_t q) {
    if (q == g.q) return;
    Trace& t = g.trace;
    auto const moved = [&](int32_t rows) {
      return Range{t.last.begin + g.slopes.begin * rows, t.last.end + g.slopes.end * rows};
    };
    Range const next = moved(1), last = moved(q - g.q);
    if (!t.goes_on(next)) {
      done_.push_back(t.band(g.q));
      t = {g.q + 1, next.begin, next.end, next};
    } else {
      t.append(next);
    }
    if (q > g.q + 1) t.append({t.last.begin + g.slopes.begin, t.last.end + g.slopes.end});
    t.last = last;
    g.q = q;
  }

  bool row(int32_t q, std::span<Event const> events) {
    row_ = q;
    old_.clear();
    opened_.clear();
    touched_.clear();
    // Everything that is about to change, by the columns of the row above.
    now_ = q - 1;
    auto const open_around = [&](int32_t i) {
      for (int32_t const band : {before_of(i), i, after_of(i)}) {
        if (band >= 0) open_group_of(band);
      }
      touched_.push_back(i);
    };
    for (int32_t const i : parting_) open_around(i);
    parting_.clear();
    for (Event const& e : events) {
      if (e.kind != kBegin) open_around(e.band);
    }
    for (Event const& e : events) {
      if (e.kind != kEnd) continue;
      for (int32_t const band : {before_of(e.band), after_of(e.band)}) {
        if (band >= 0) touched_.push_back(band);
      }
      live_.erase(where(e.band));
    }
    now_ = q;
    for (Event const& e : events) {
      if (e.kind != kBegin) continue;
      auto const [position, is_new] = live_.insert(e.band);
      if (!is_new) return false;
      where(e.band) = position;
      touched_.push_back(e.band);
      for (int32_t const band : {before_of(e.band), after_of(e.band)}) {
        if (band >= 0) open_group_of(band);
      }
    }

    // Who touches whom, now that all are in their places, and who is the first of an interval: one that was, or one
    // beside a change. Groups that were not opened keep theirs.
    new_heads_.clear();
    auto const add = [&](int32_t i) {
      if (i < 0 || at(i).q1 <= q || mark_[static_cast<size_t>(i)] == q) return;
      mark_[static_cast<size_t>(i)] = q;
      new_heads_.push_back(i);
    };
    for (int32_t const i : touched_) {
      if (at(i).q1 <= q) continue;
      int32_t const left = before_of(i), right = after_of(i);
      if (!join(left, i, q) || !join(i, right, q)) return false;
      add(i);
      add(right);
    }
    for (int32_t const i : opened_) add(i);
    std::erase_if(new_heads_, [&](int32_t i) {
      int32_t const left = before_of(i);
      return (left >= 0 && is_joined_[static_cast<size_t>(left)]) || heads_.contains(i);
    });
    std::sort(new_heads_.begin(), new_heads_.end(), live_.key_comp());
    for (int32_t const i : new_heads_) heads_.insert(i);
    continue_traces(q);
    return true;
  }

  // Whether two neighbours touch in row q; false when they share a cell before one of them changes again.
  bool join(int32_t left, int32_t right, int32_t q) {
    if (left < 0 || right < 0) {
      if (left >= 0) is_joined_[static_cast<size_t>(left)] = false;
      return true;
    }
    Band const &a = at(left), &b = at(right);
    auto const gap = [&](int64_t row) {
      int32_t const r = static_cast<int32_t>(row);
      return int64_t{columns(b, r).begin} - columns(a, r).end;
    };
    int64_t const next = std::min(next_event(a, q), next_event(b, q));
    int64_t const here = gap(q);
    if (here < 0 || gap(next - 1) < 0) return false;
    is_joined_[static_cast<size_t>(left)] = here == 0;
    // They cannot come to touch without an event: a gap that closes has a moving end on its left, and a shrunk band's
    // ends stop at an event.
    if (here == 0 && next > q + 1 && gap(q + 1) != 0) {
      parting_.push_back(left);
      parting_row_ = q + 1;
    }
    return true;
  }

  // Matches the intervals that were opened in the row above with those of row q, as RowLinker::row does.
  void continue_traces(int32_t q) {
    std::sort(old_.begin(), old_.end(), [](Trace const& a, Trace const& b) { return a.last.begin < b.last.begin; });
    size_t i = 0;
    for (int32_t const first : new_heads_) {
      auto const next = heads_.upper_bound(first);
      Group& g = group(first);
      g.q = q;
      g.last_band = next == heads_.end() ? *live_.rbegin() : before_of(*next);
      Range const r{columns(at(first), q).begin, columns(at(g.last_band), q).end};
      g.slopes = {slopes_at(at(first), q).begin, slopes_at(at(g.last_band), q).end};
      while (i < old_.size() && old_[i].last.begin + 1 < r.begin) done_.push_back(old_[i++].band(q - 1));
      if (i < old_.size() && old_[i].last.begin <= r.begin && old_[i].goes_on(r)) {
        g.trace = old_[i++];
        g.trace.append(r);
        continue;
      }
      if (i < old_.size() && old_[i].last.begin <= r.begin) done_.push_back(old_[i++].band(q - 1));
      g.trace = {q, r.begin, r.end, r};
    }
    for (; i < old_.size(); ++i) done_.push_back(old_[i].band(q - 1));
  }

  std::span<Band const> bands_;
  int32_t now_ = 0, row_ = 0;  // the row by whose columns bands are compared; the row at work
  Set live_, heads_;
  std::vector<Set::iterator> where_;  // of live bands
  std::vector<Group> groups_;         // of heads
  std::vector<char> is_joined_;       // to the band on the right
  std::vector<int32_t> mark_;         // the last row in which a band was looked at
  std::vector<int32_t> parting_;      // bands that touch their right neighbour in the row above parting_row_, and part
  int32_t parting_row_ = 0;
  std::vector<Trace> old_;  // of groups taken apart in this row
  // In this row: first bands of groups taken apart, bands whose neighbours may be others, first bands of new groups.
  std::vector<int32_t> opened_, touched_, new_heads_;
  std::vector<Band> done_;
};

}  // namespace

bool normal_form(std::span<Band const> bands, std::vector<Band>& out) { return Sweep(bands).run(out); }

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
