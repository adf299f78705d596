#include "host/stage.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace magi {
namespace {

using Wide = __int128;  // a cost: pairs x femtoseconds pass 64 bits for long sequences
constexpr Wide kUnreachable = static_cast<Wide>(1) << 120;
constexpr int kMaxCuts = 16;  // groups of pieces the exact search looks at: its time grows with the cube

Wide transfer_cost(int64_t tokens, StageOptions const& o) {
  return tokens == 0 ? Wide{0} : Wide{o.transfer_start_fs} + Wide{tokens} * o.token_cost_fs;
}

Wide compute_cost(int64_t area, StageOptions const& o) {
  return area == 0 ? Wide{0} : Wide{o.compute_start_fs} + Wide{area} * o.pair_cost_fs;
}

// max(comm_0, calc_local) + sum over stages of max(comm_i, calc_{i-1}) + calc_last.
Wide overlap_cost(int64_t local_area, std::span<int64_t const> tokens, std::span<int64_t const> areas,
                  StageOptions const& o) {
  Wide cost = 0, before = compute_cost(local_area, o);
  for (size_t i = 0; i < tokens.size(); ++i) {
    cost += std::max(before, transfer_cost(tokens[i], o));
    before = compute_cost(areas[i], o);
  }
  return cost + before;
}

// splitmix64: the order of a shuffle is a function of the seed alone.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Ranges holding tokens [i * size, (i + 1) * size) of the compacted remote axis, one list a piece.
std::vector<std::vector<Range>> cut_pieces(std::span<Range const> remote, int64_t size) {
  std::vector<std::vector<Range>> pieces;
  int64_t room = 0;
  for (Range range : remote) {
    while (!range.is_empty()) {
      if (room == 0) {
        pieces.emplace_back();
        room = size;
      }
      auto const taken = static_cast<int32_t>(std::min<int64_t>(room, range.length()));
      pieces.back().push_back({range.begin, range.begin + taken});
      range.begin += taken;
      room -= taken;
    }
  }
  return pieces;
}

std::vector<std::vector<Range>> pieces_of(std::span<Range const> remote, StageOptions const& o) {
  int64_t tokens = 0;
  for (Range const& r : remote) tokens += r.length();
  int64_t const floor = (tokens + o.max_num_chunks - 1) / o.max_num_chunks;
  return cut_pieces(remote, std::max<int64_t>({o.min_chunk_size, floor, 1}));
}

// Joins pieces until at most kMaxCuts are left. The first groups stay small, because what hides well is decided there.
std::vector<std::vector<Range>> coarsen(std::vector<std::vector<Range>> pieces) {
  size_t const n = pieces.size();
  if (n <= kMaxCuts) return pieces;
  std::vector<std::vector<Range>> out;
  for (size_t g = 0, begin = 0; g < kMaxCuts; ++g) {
    // Group borders grow quadratically: n * ((g + 1) / cuts)^2, at least one piece each.
    size_t end = n * (g + 1) * (g + 1) / (size_t{kMaxCuts} * kMaxCuts);
    end = std::clamp(end, begin + 1, n - (kMaxCuts - 1 - g));
    auto& group = out.emplace_back();
    for (; begin < end; ++begin) group.insert(group.end(), pieces[begin].begin(), pieces[begin].end());
  }
  return out;
}

std::vector<Range> joined(std::span<std::vector<Range> const> pieces, std::span<size_t const> order) {
  std::vector<Range> all;
  for (size_t const i : order) all.insert(all.end(), pieces[i].begin(), pieces[i].end());
  std::sort(all.begin(), all.end(), [](Range const& a, Range const& b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i].begin == all[kept].end)
      all[kept].end = all[i].end;
    else
      all[++kept] = all[i];
  }
  if (!all.empty()) all.resize(kept + 1);
  return all;
}

// Number of pieces of each of `degree` stages: near equal, smaller first, empty ones last.
std::vector<size_t> uniform_sizes(size_t num_pieces, size_t degree) {
  size_t const used = std::min(num_pieces, degree);
  std::vector<size_t> sizes(degree, 0);
  for (size_t i = 0; i < used; ++i) sizes[i] = num_pieces / used + (i + num_pieces % used >= used ? 1 : 0);
  return sizes;
}

StagePart grouped(std::span<std::vector<Range> const> pieces, std::span<size_t const> order,
                  std::span<size_t const> sizes) {
  StagePart part;
  size_t begin = 0;
  for (size_t const size : sizes) {
    part.ranges.push_back(joined(pieces, order.subspan(begin, size)));
    begin += size;
  }
  return part;
}

struct Measured {
  std::vector<int64_t> tokens, areas;  // prefix sums over pieces
};

Measured measure(std::span<std::vector<Range> const> pieces, std::span<Band const> bands) {
  Measured m{{0}, {0}};
  for (auto const& piece : pieces) {
    int64_t tokens = 0, sum = 0;
    for (Range const& r : piece) {
      tokens += r.length();
      sum += area_of_keys(bands, r);
    }
    m.tokens.push_back(m.tokens.back() + tokens);
    m.areas.push_back(m.areas.back() + sum);
  }
  return m;
}

// best[d - 1] = borders of exactly d stages with the least predicted cost. State (begin, end) of the last stage.
struct Borders {
  Wide cost = kUnreachable;
  std::vector<size_t> sizes;
};

std::vector<Borders> best_borders(Measured const& m, int64_t local_area, size_t max_degree, StageOptions const& o) {
  size_t const n = m.tokens.size() - 1;
  max_degree = std::min(max_degree, n);
  std::vector<Borders> best(max_degree);
  size_t const width = n + 1;
  auto const at = [width](size_t begin, size_t end) { return begin * width + end; };
  std::vector<Wide> comm(width * width), calc(width * width), cost(width * width, kUnreachable), next;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = i + 1; j <= n; ++j) {
      comm[at(i, j)] = transfer_cost(m.tokens[j] - m.tokens[i], o);
      calc[at(i, j)] = compute_cost(m.areas[j] - m.areas[i], o);
    }
  }
  Wide const local = compute_cost(local_area, o);
  std::vector<std::vector<size_t>> from(max_degree, std::vector<size_t>(width * width, 0));
  for (size_t j = 1; j <= n; ++j) cost[at(0, j)] = std::max(local, comm[at(0, j)]);
  for (size_t d = 0; d < max_degree; ++d) {
    if (d > 0) {
      next.assign(width * width, kUnreachable);
      for (size_t i = d; i < n; ++i) {  // the last stage begins here; the one before is (h, i)
        for (size_t j = i + 1; j <= n; ++j) {
          for (size_t h = d - 1; h < i; ++h) {
            if (cost[at(h, i)] >= kUnreachable) continue;
            Wide const c = cost[at(h, i)] + std::max(comm[at(i, j)], calc[at(h, i)]);
            if (c < next[at(i, j)]) {
              next[at(i, j)] = c;
              from[d][at(i, j)] = h;
            }
          }
        }
      }
      cost.swap(next);
    }
    size_t begin = n;
    for (size_t i = 0; i < n; ++i) {
      if (cost[at(i, n)] >= kUnreachable) continue;
      Wide const c = cost[at(i, n)] + calc[at(i, n)];
      if (c < best[d].cost) {
        best[d].cost = c;
        begin = i;
      }
    }
    if (begin == n) continue;
    std::vector<size_t> borders{n};
    for (size_t level = d, end = n;; --level) {
      borders.push_back(begin);
      if (level == 0) break;
      size_t const before = from[level][at(begin, end)];
      end = begin;
      begin = before;
    }
    std::reverse(borders.begin(), borders.end());
    for (size_t i = 0; i + 1 < borders.size(); ++i) best[d].sizes.push_back(borders[i + 1] - borders[i]);
  }
  return best;
}

}  // namespace

int64_t area_of_keys(std::span<Band const> bands, Range keys) {
  int64_t sum = 0;
  for (Band const& b : bands) {
    if (b.k0 < keys.end && keys.begin < b.k1) sum += area(clip(b, {b.q0, b.q1}, keys));
  }
  return sum;
}

StageSplit split_stages(std::span<StageInput const> ranks, StageOptions const& o) {
  StageSplit split;
  split.ranks.resize(ranks.size());
  bool const automatic = o.degree < 0;
  auto const max_degree = static_cast<size_t>(std::max(1, automatic ? o.max_degree : o.degree));
  bool const needs_costs = automatic || o.alg == StageAlg::kGreedy;
  // candidates[d - 1][rank]: the split into at most d stages; totals[d - 1]: the slowest rank's predicted time.
  std::vector<std::vector<StagePart>> candidates(automatic ? max_degree : 1, std::vector<StagePart>(ranks.size()));
  std::vector<Wide> totals(candidates.size(), 0);
  std::vector<size_t> order, sizes;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    StageInput const& in = ranks[rank];
    if (in.remote.empty()) {
      for (Wide& total : totals) total = std::max(total, needs_costs ? compute_cost(in.local_area, o) : Wide{0});
      continue;
    }
    auto pieces = o.degree == 0 ? cut_pieces(in.remote, std::numeric_limits<int32_t>::max()) : pieces_of(in.remote, o);
    bool const greedy = o.alg == StageAlg::kGreedy && o.degree != 0;
    if (greedy) pieces = coarsen(std::move(pieces));
    order.resize(pieces.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (o.shuffle && !greedy) {
      uint64_t state = o.seed;
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(state) % i]);
      std::vector<std::vector<Range>> dealt;
      for (size_t const i : order) dealt.push_back(pieces[i]);
      pieces = std::move(dealt);
      std::iota(order.begin(), order.end(), size_t{0});
    }
    Measured m;
    std::vector<Borders> best;
    if (needs_costs) m = measure(pieces, in.pieces_of_mask);
    if (greedy) best = best_borders(m, in.local_area, max_degree, o);
    for (size_t c = 0; c < candidates.size(); ++c) {
      size_t const degree = automatic ? c + 1 : max_degree;
      if (greedy) {
        // Fewer stages may be faster than exactly `degree`: take the best up to it.
        size_t chosen = 0;
        for (size_t d = 1; d < std::min(degree, best.size()); ++d) {
          if (best[d].cost < best[chosen].cost) chosen = d;
        }
        sizes = best[chosen].sizes;
      } else {
        sizes = uniform_sizes(pieces.size(), degree);
      }
      candidates[c][rank] = grouped(pieces, order, sizes);
      if (!needs_costs) continue;
      std::vector<int64_t> tokens, areas;
      size_t at = 0;
      for (size_t const size : sizes) {
        tokens.push_back(m.tokens[at + size] - m.tokens[at]);
        areas.push_back(m.areas[at + size] - m.areas[at]);
        at += size;
      }
      totals[c] = std::max(totals[c], overlap_cost(in.local_area, tokens, areas, o));
    }
  }
  size_t chosen = 0;  // ties go to fewer stages
  for (size_t c = 1; c < totals.size(); ++c) {
    if (totals[c] < totals[chosen]) chosen = c;
  }
  split.predicted_fs = static_cast<int64_t>(std::min<Wide>(totals[chosen], std::numeric_limits<int64_t>::max()));
  split.ranks = std::move(candidates[chosen]);
  size_t num_stages = 0;
  for (StagePart const& part : split.ranks) {
    for (size_t s = 0; s < part.ranges.size(); ++s) {
      if (!part.ranges[s].empty()) num_stages = std::max(num_stages, s + 1);
    }
  }
  for (StagePart& part : split.ranks) part.ranges.resize(num_stages);
  split.num_stages = static_cast<int32_t>(num_stages);
  return split;
}

}  // namespace magi
