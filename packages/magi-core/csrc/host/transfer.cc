#include "host/transfer.h"

#include <algorithm>

namespace magi {

std::vector<Range> merged(std::vector<Range> ranges) {
  std::erase_if(ranges, [](Range const& r) { return r.is_empty(); });
  std::sort(ranges.begin(), ranges.end(), [](Range const& a, Range const& b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin <= ranges[kept].end)
      ranges[kept].end = std::max(ranges[kept].end, ranges[i].end);
    else
      ranges[++kept] = ranges[i];
  }
  if (!ranges.empty()) ranges.resize(kept + 1);
  return ranges;
}

std::vector<Range> difference(std::span<Range const> a, std::span<Range const> b) {
  std::vector<Range> out;
  size_t j = 0;
  for (Range const& range : a) {
    int32_t begin = range.begin;
    while (j < b.size() && b[j].end <= begin) ++j;
    for (size_t i = j; i < b.size() && b[i].begin < range.end; ++i) {
      if (b[i].begin > begin) out.push_back({begin, b[i].begin});
      begin = std::max(begin, b[i].end);
    }
    if (begin < range.end) out.push_back({begin, range.end});
  }
  return out;
}

std::vector<Range> intersection(std::span<Range const> a, std::span<Range const> b) {
  std::vector<Range> out;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    int32_t const begin = std::max(a[i].begin, b[j].begin), end = std::min(a[i].end, b[j].end);
    if (begin < end) out.push_back({begin, end});
    if (a[i].end < b[j].end)
      ++i;
    else
      ++j;
  }
  return out;
}

int64_t num_tokens(std::span<Range const> ranges) {
  int64_t sum = 0;
  for (Range const& r : ranges) sum += r.length();
  return sum;
}

std::vector<RowPiece> clip_to_runs(std::span<Band const> bands, std::span<Range const> runs) {
  // Bands entered in order of q0; those that ended before the run are dropped, so the work is the number of pieces.
  std::vector<int32_t> order(bands.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  auto const at = [&](int32_t i) -> Band const& { return bands[static_cast<size_t>(i)]; };
  auto const before = [&](int32_t a, int32_t b) { return at(a).q0 != at(b).q0 ? at(a).q0 < at(b).q0 : a < b; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  std::vector<RowPiece> pieces;
  std::vector<int32_t> active;
  size_t next = 0;
  for (size_t r = 0; r < runs.size(); ++r) {
    while (next < order.size() && at(order[next]).q0 < runs[r].end) active.push_back(order[next++]);
    size_t kept = 0;
    for (int32_t const i : active) {
      if (at(i).q1 <= runs[r].begin) continue;
      active[kept++] = i;
      Band const piece = clip(at(i), runs[r], {at(i).k0, at(i).k1});
      if (!is_empty(piece)) pieces.push_back({static_cast<int32_t>(r), piece});
    }
    active.resize(kept);
  }
  return pieces;
}

std::vector<RankNeeds> rank_needs(std::span<Band const> bands, Owners const& q_owners, Owners const& k_owners) {
  std::vector<RankNeeds> needs(static_cast<size_t>(q_owners.world_size));
  std::vector<Range> runs;
  runs.reserve(q_owners.runs.size());
  for (int32_t const i : q_owners.by_begin) {
    Run const& run = q_owners.runs[static_cast<size_t>(i)];
    runs.push_back({run.begin, run.end});
  }
  std::vector<std::vector<Range>> seen(needs.size());
  for (RowPiece const& piece : clip_to_runs(bands, runs)) {
    auto const i = static_cast<size_t>(q_owners.by_begin[static_cast<size_t>(piece.run)]);
    auto const rank = static_cast<size_t>(q_owners.runs[i].rank);
    needs[rank].area += area(piece.band);
    seen[rank].push_back({piece.band.k0, piece.band.k1});
  }
  std::vector<Range> own;
  for (size_t rank = 0; rank < needs.size(); ++rank) {
    own.clear();
    for (Run const& run : k_owners.of(static_cast<int32_t>(rank))) own.push_back({run.begin, run.end});
    needs[rank].remote = difference(merged(std::move(seen[rank])), own);
  }
  return needs;
}

std::vector<Transfer> receives(std::span<Range const> remote, Owners const& k_owners) {
  std::vector<Transfer> out;
  size_t at = 0;
  for (Range const& range : remote) {
    if (at < k_owners.by_begin.size() && k_owners.runs[static_cast<size_t>(k_owners.by_begin[at])].end <= range.begin) {
      at = k_owners.position_of(range.begin);
    }
    for (; at < k_owners.by_begin.size(); ++at) {
      Run const& run = k_owners.runs[static_cast<size_t>(k_owners.by_begin[at])];
      if (run.begin >= range.end) break;
      out.push_back({run.rank, std::max(run.begin, range.begin), std::min(run.end, range.end)});
      if (run.end > range.end) break;
    }
  }
  return out;
}

}  // namespace magi
