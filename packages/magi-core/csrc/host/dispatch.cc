#include "host/dispatch.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <tuple>

#include "host/dispatch_locality.h"
#include "host/transfer.h"

namespace magi {
namespace {

using std::to_string;

size_t at(int32_t i) { return static_cast<size_t>(i); }

// splitmix64: the order of a shuffle is a function of the seed alone.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

constexpr int32_t kMaxChunks = 1 << 24;

void check_world_size(int32_t world_size) {
  if (world_size < 1 || world_size > kMaxWorldSize) {
    throw std::invalid_argument("world_size must be at least 1 and at most " + to_string(kMaxWorldSize) + ", got " +
                                to_string(world_size));
  }
}

std::vector<int32_t> largest_first(std::span<int64_t const> areas) {
  std::vector<int32_t> order(areas.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return areas[at(a)] > areas[at(b)]; });
  return order;
}

// Loads and counts of ranks under "counts differ by at most one".
struct Ranks {
  std::vector<int64_t> load;
  std::vector<int32_t> count;
  int32_t floor, extra;  // every rank takes `floor` chunks, `extra` of them one more

  Ranks(int32_t world, size_t num_chunks)
      : load(at(world), 0),
        count(at(world), 0),
        floor(static_cast<int32_t>(num_chunks) / world),
        extra(static_cast<int32_t>(num_chunks) % world) {}
  bool is_open(int32_t r) const { return count[at(r)] < floor || (count[at(r)] == floor && extra > 0); }
  void add(int32_t r, int64_t area) {
    if (count[at(r)] == floor) --extra;
    ++count[at(r)];
    load[at(r)] += area;
  }
  auto key(int32_t r) const { return std::tuple(load[at(r)], count[at(r)], r); }
};

std::vector<int32_t> min_heap(std::span<int64_t const> areas, int32_t world) {
  Ranks ranks(world, areas.size());
  std::vector<int32_t> out(areas.size());
  using Entry = std::tuple<int64_t, int32_t, int32_t>;  // load, count, rank: equal loads fill evenly
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> heap;
  for (int32_t r = 0; r < world; ++r) heap.emplace(0, 0, r);
  for (int32_t const chunk : largest_first(areas)) {
    while (!ranks.is_open(std::get<2>(heap.top()))) heap.pop();
    int32_t const r = std::get<2>(heap.top());
    heap.pop();
    ranks.add(r, areas[at(chunk)]);
    out[at(chunk)] = r;
    heap.push(ranks.key(r));
  }
  return out;
}

std::vector<int32_t> blocks(std::span<int32_t const> order, int32_t world) {
  std::vector<int32_t> out(order.size());
  auto const n = static_cast<int32_t>(order.size());
  int32_t i = 0;
  for (int32_t r = 0; r < world; ++r) {
    for (int32_t left = n / world + (r < n % world ? 1 : 0); left > 0; --left) out[at(order[at(i++)])] = r;
  }
  return out;
}

std::vector<int64_t> loads_of(std::span<int32_t const> ranks, std::span<int64_t const> areas, int32_t world) {
  std::vector<int64_t> load(at(world), 0);
  for (size_t i = 0; i < ranks.size(); ++i) load[at(ranks[i])] += areas[i];
  return load;
}

// Swaps between the fullest rank and any other as long as the pair's larger load falls.
std::vector<int32_t> swap_down(std::vector<int32_t> out, std::span<int64_t const> areas, int32_t world, int64_t steps) {
  auto load = loads_of(out, areas, world);
  std::vector<std::vector<int32_t>> chunks(at(world));
  for (size_t i = 0; i < out.size(); ++i) chunks[at(out[i])].push_back(static_cast<int32_t>(i));
  int64_t const bound = dispatch_lower_bound(areas, world);
  while (true) {
    auto const full = static_cast<int32_t>(std::max_element(load.begin(), load.end()) - load.begin());
    if (load[at(full)] <= bound) return out;
    int64_t best = load[at(full)];
    std::tuple<int32_t, size_t, size_t> found{-1, 0, 0};
    for (int32_t r = 0; r < world; ++r) {
      if (r == full) continue;
      for (size_t i = 0; i < chunks[at(full)].size(); ++i) {
        for (size_t j = 0; j < chunks[at(r)].size(); ++j) {
          if (--steps < 0) return out;
          int64_t const moved = areas[at(chunks[at(full)][i])] - areas[at(chunks[at(r)][j])];
          if (moved <= 0) continue;
          int64_t const now = std::max(load[at(full)] - moved, load[at(r)] + moved);
          if (now < best) {
            best = now;
            found = {r, i, j};
          }
        }
      }
    }
    auto const [r, i, j] = found;
    if (r < 0) return out;
    int64_t const moved = areas[at(chunks[at(full)][i])] - areas[at(chunks[at(r)][j])];
    load[at(full)] -= moved;
    load[at(r)] += moved;
    std::swap(chunks[at(full)][i], chunks[at(r)][j]);
    out[at(chunks[at(full)][i])] = full;
    out[at(chunks[at(r)][j])] = r;
  }
}

// First fit of the chunks, largest first, under a bound on every load, with backtracking. Ranks that look alike are
// tried once. Gives up after `steps` comparisons, so "none" then means "none found".
std::optional<std::vector<int32_t>> fit(std::span<int64_t const> areas, int32_t world, int64_t bound, bool equal_counts,
                                        int64_t& steps) {
  auto const order = largest_first(areas);
  size_t const n = order.size();
  std::vector<int32_t> chosen(n, -1);
  Ranks ranks(world, n);
  size_t depth = 0;
  while (depth < n) {
    int64_t const area = areas[at(order[depth])];
    int32_t r = chosen[depth];
    if (r >= 0) {  // coming back: undo
      ranks.load[at(r)] -= area;
      if (--ranks.count[at(r)] == ranks.floor) ++ranks.extra;
    }
    for (++r; r < world; ++r) {
      if (--steps < 0) return std::nullopt;
      if (ranks.load[at(r)] + area > bound || (equal_counts && !ranks.is_open(r))) continue;
      bool alike = false;
      for (int32_t other = 0; other < r && !alike; ++other) {
        --steps;
        alike = ranks.load[at(other)] == ranks.load[at(r)] &&
                (!equal_counts || ranks.count[at(other)] == ranks.count[at(r)]);
      }
      if (!alike) break;
    }
    if (r == world) {
      chosen[depth] = -1;
      if (depth == 0) return std::nullopt;
      --depth;
      continue;
    }
    chosen[depth++] = r;
    ranks.add(r, area);
  }
  std::vector<int32_t> out(n);
  for (size_t i = 0; i < n; ++i) out[at(order[i])] = chosen[i];
  return out;
}

// The least bound that `fit` reaches, between the lower bound and min-heap's load.
std::vector<int32_t> search(std::span<int64_t const> areas, int32_t world, bool equal_counts, int64_t node_limit) {
  auto best = min_heap(areas, world);
  auto const load = loads_of(best, areas, world);
  int64_t low = dispatch_lower_bound(areas, world), high = *std::max_element(load.begin(), load.end());
  while (low < high) {
    int64_t const middle = low + (high - low) / 2;
    int64_t steps = node_limit / 8;
    if (auto found = fit(areas, world, middle, equal_counts, steps)) {
      best = std::move(*found);
      auto const now = loads_of(best, areas, world);
      high = *std::max_element(now.begin(), now.end());
    } else {
      low = middle + 1;
    }
  }
  return best;
}

// Exact: best[r][set] = least largest load of `set` on r + 1 ranks, over every subset given to the last one.
constexpr size_t kMaxDynamicChunks = 12;
std::vector<int32_t> dynamic(std::span<int64_t const> areas, int32_t world) {
  size_t const n = areas.size(), sets = size_t{1} << n;
  auto const levels = static_cast<size_t>(std::min<int64_t>(world, static_cast<int64_t>(std::max<size_t>(n, 1))));
  std::vector<int64_t> sum(sets, 0);
  for (size_t s = 1; s < sets; ++s) {
    auto const low = static_cast<size_t>(__builtin_ctzll(s));
    sum[s] = sum[s & (s - 1)] + areas[low];
  }
  std::vector<std::vector<int64_t>> best(levels, sum);
  std::vector<std::vector<size_t>> given(levels, std::vector<size_t>(sets, 0));
  for (size_t s = 0; s < sets; ++s) given[0][s] = s;
  for (size_t r = 1; r < levels; ++r) {
    for (size_t s = 0; s < sets; ++s) {
      best[r][s] = best[r - 1][s];  // nothing for rank r
      for (size_t part = s; part > 0; part = (part - 1) & s) {
        int64_t const now = std::max(sum[part], best[r - 1][s ^ part]);
        if (now < best[r][s]) {
          best[r][s] = now;
          given[r][s] = part;
        }
      }
    }
  }
  std::vector<int32_t> out(n, 0);
  size_t left = sets - 1;
  for (size_t r = levels; r-- > 0;) {
    size_t const part = given[r][left];
    for (size_t i = 0; i < n; ++i) {
      if (part >> i & 1) out[i] = static_cast<int32_t>(r);
    }
    left ^= part;
  }
  return out;
}

std::vector<std::vector<Range>> keys_of_chunks(std::span<Band const> bands, std::span<Range const> chunks) {
  std::vector<std::vector<Range>> keys(chunks.size());
  for (RowPiece const& piece : clip_to_runs(bands, chunks)) {
    keys[at(piece.run)].push_back({piece.band.k0, piece.band.k1});
  }
  for (auto& list : keys) list = merged(std::move(list));
  return keys;
}

std::vector<int32_t> topp(std::span<int64_t const> areas, int32_t world, std::span<std::vector<Range> const> keys,
                          int32_t num_candidates, int32_t batch) {
  Ranks ranks(world, areas.size());
  std::vector<std::vector<Range>> held(at(world));
  std::vector<int32_t> out(areas.size()), open;
  auto const order = largest_first(areas);
  std::vector<int32_t> waiting;
  for (size_t next = 0; next < order.size() || !waiting.empty();) {
    if (waiting.empty()) {
      for (int32_t i = 0; i < batch && next < order.size(); ++i) waiting.push_back(order[next++]);
    }
    open.clear();
    for (int32_t r = 0; r < world; ++r) {
      if (ranks.is_open(r)) open.push_back(r);
    }
    std::sort(open.begin(), open.end(), [&](int32_t a, int32_t b) { return ranks.key(a) < ranks.key(b); });
    if (open.size() > at(num_candidates)) open.resize(at(num_candidates));
    int64_t best = -1;
    size_t best_chunk = 0;
    int32_t best_rank = open[0];
    for (size_t c = 0; c < waiting.size(); ++c) {
      for (int32_t const r : open) {
        int64_t const shared = num_tokens(intersection(held[at(r)], keys[at(waiting[c])]));
        if (shared > best) {
          best = shared;
          best_chunk = c;
          best_rank = r;
        }
      }
    }
    int32_t const chunk = waiting[best_chunk];
    waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(best_chunk));
    ranks.add(best_rank, areas[at(chunk)]);
    out[at(chunk)] = best_rank;
    auto& mine = held[at(best_rank)];
    mine.insert(mine.end(), keys[at(chunk)].begin(), keys[at(chunk)].end());
    mine = merged(std::move(mine));
  }
  return out;
}

std::vector<int32_t> sorted_sequential(std::span<int64_t const> areas, int32_t world, std::span<Band const> bands,
                                       int32_t chunk_size, int32_t ratio_ppm) {
  Ranks ranks(world, areas.size());
  std::vector<int32_t> out(areas.size(), -1);
  auto const n = static_cast<int32_t>(areas.size());
  auto const lightest = [&] {
    int32_t best = -1;
    for (int32_t r = 0; r < world; ++r) {
      if (ranks.is_open(r) && (best < 0 || ranks.key(r) < ranks.key(best))) best = r;
    }
    return best;
  };
  std::vector<int32_t> slices(bands.size());
  std::iota(slices.begin(), slices.end(), 0);
  std::stable_sort(slices.begin(), slices.end(),
                   [&](int32_t a, int32_t b) { return area(bands[at(a)]) > area(bands[at(b)]); });
  std::vector<int32_t> mine;
  for (int32_t const slice : slices) {
    Band const& band = bands[at(slice)];
    if (is_empty(band)) continue;
    mine.clear();
    for (int32_t c = (band.q1 - 1) / chunk_size; c >= band.q0 / chunk_size; --c) {
      if (c < n && out[at(c)] < 0) mine.push_back(c);
    }
    int64_t const most = std::max<int64_t>(1, (static_cast<int64_t>(mine.size()) * ratio_ppm + 999'999) / 1'000'000);
    int64_t poured = 0;
    int32_t rank = -1;
    for (int32_t const c : mine) {
      if (rank < 0 || poured == most || !ranks.is_open(rank)) {
        rank = lightest();
        poured = 0;
      }
      ranks.add(rank, areas[at(c)]);
      out[at(c)] = rank;
      ++poured;
    }
  }
  for (int32_t c = 0; c < n; ++c) {  // chunks that see nothing fill the rest
    if (out[at(c)] >= 0) continue;
    int32_t const rank = lightest();
    ranks.add(rank, areas[at(c)]);
    out[at(c)] = rank;
  }
  return out;
}

}  // namespace

std::vector<int64_t> chunk_areas(std::span<Band const> bands, int32_t chunk_size, int32_t total_q) {
  if (chunk_size < 1) throw std::invalid_argument("chunk_size must be at least 1, got " + to_string(chunk_size));
  if (total_q < 0) throw std::invalid_argument("total_q must not be negative, got " + to_string(total_q));
  if (total_q / chunk_size >= kMaxChunks) {
    throw std::invalid_argument("chunk_size must give at most " + to_string(kMaxChunks) + " chunks, got " +
                                to_string(chunk_size) + " for " + to_string(total_q) + " rows");
  }
  std::vector<int64_t> areas(at(total_q / chunk_size + (total_q % chunk_size != 0)), 0);
  for (Band const& band : bands) {
    if (is_empty(band)) continue;
    if (band.q0 < 0 || band.q1 > total_q) {
      throw std::invalid_argument("bands: rows [" + to_string(band.q0) + ", " + to_string(band.q1) +
                                  ") must lie inside [0, total_q = " + to_string(total_q) + ")");
    }
    for (int32_t c = band.q0 / chunk_size; c <= (band.q1 - 1) / chunk_size; ++c) {
      int64_t const begin = int64_t{c} * chunk_size;
      auto const end = static_cast<int32_t>(std::min<int64_t>(begin + chunk_size, total_q));
      areas[at(c)] += area(clip(band, {static_cast<int32_t>(begin), end}, {band.k0, band.k1}));
    }
  }
  return areas;
}

int32_t suggest_chunk_size(std::span<Band const> bands, int32_t total_q, int32_t world_size, int32_t limit) {
  check_world_size(world_size);
  if (limit < 1) throw std::invalid_argument("limit must be at least 1, got " + to_string(limit));
  auto const pieces = [&](int64_t a_rank) {
    return static_cast<int32_t>((total_q + a_rank * world_size - 1) / (a_rank * world_size));
  };
  int32_t size = std::max(1, std::min(limit, pieces(8)));
  while (size > 64 && size > pieces(64)) {
    __int128 sum = 0;
    int64_t largest = 0;
    for (int64_t const a : chunk_areas(bands, size, total_q)) {
      sum += a;
      largest = std::max(largest, a);
    }
    if (__int128{5} * largest * world_size <= 4 * sum) break;
    size = (size + 1) / 2;
  }
  return size;
}

int64_t dispatch_lower_bound(std::span<int64_t const> areas, int32_t world_size) {
  __int128 sum = 0;
  for (int64_t const a : areas) sum += a;
  auto bound = static_cast<int64_t>((sum + world_size - 1) / world_size);
  auto const order = largest_first(areas);
  if (!order.empty()) bound = std::max(bound, areas[at(order[0])]);
  // One chunk more than ranks: two of the largest world_size + 1 share a rank, at best the two smallest of them.
  if (order.size() > at(world_size)) {
    bound = std::max(bound, areas[at(order[at(world_size) - 1])] + areas[at(order[at(world_size)])]);
  }
  return bound;
}

std::vector<int32_t> dispatch_chunks(std::span<int64_t const> areas, int32_t world_size, std::span<Band const> bands,
                                     int32_t chunk_size, int32_t total_q, DispatchOptions const& o) {
  check_world_size(world_size);
  if (areas.size() > at(kMaxChunks)) {
    throw std::invalid_argument("areas must have at most " + to_string(kMaxChunks) + " chunks, got " +
                                to_string(areas.size()));
  }
  __int128 sum = 0;
  for (int64_t const a : areas) {
    if (a < 0) throw std::invalid_argument("areas must not be negative, got " + to_string(a));
    sum += a;
  }
  if (sum > std::numeric_limits<int64_t>::max() / 4) throw std::invalid_argument("areas: their sum must fit 62 bits");
  if (o.num_candidates < 1 || o.batch < 1 || o.ratio_ppm < 1 || o.node_limit < 0 || o.balance_ppm < 0 ||
      o.pair_cost_fs < 0 || o.token_cost_fs < 0) {
    throw std::invalid_argument("dispatch options must be positive");
  }
  std::vector<Range> chunks;
  bool const uses_bands = o.alg == DispatchAlg::kToppHeap || o.alg == DispatchAlg::kBatchToppHeap ||
                          o.alg == DispatchAlg::kSortedSequential ||
                          (o.alg == DispatchAlg::kBalanced && !bands.empty());
  if (uses_bands) {
    if (chunk_size < 1) throw std::invalid_argument("chunk_size must be at least 1, got " + to_string(chunk_size));
    int64_t const expected = (int64_t{total_q} + chunk_size - 1) / chunk_size;
    if (expected != static_cast<int64_t>(areas.size())) {
      throw std::invalid_argument("areas must have one entry per chunk (" + to_string(expected) + "), got " +
                                  to_string(areas.size()));
    }
    for (int64_t begin = 0; begin < total_q; begin += chunk_size) {
      chunks.push_back(
          {static_cast<int32_t>(begin), static_cast<int32_t>(std::min<int64_t>(begin + chunk_size, total_q))});
    }
  }
  if (areas.empty()) return {};
  std::vector<int32_t> order(areas.size());
  std::iota(order.begin(), order.end(), 0);
  switch (o.alg) {
    case DispatchAlg::kBalanced:
      return dispatch_locality(areas, world_size, bands, chunks, o);
    case DispatchAlg::kMinHeap:
      return min_heap(areas, world_size);
    case DispatchAlg::kSequential:
      return blocks(order, world_size);
    case DispatchAlg::kLowerBound:
      return swap_down(min_heap(areas, world_size), areas, world_size, o.node_limit);
    case DispatchAlg::kDynamic:
      return areas.size() <= kMaxDynamicChunks ? dynamic(areas, world_size)
                                               : search(areas, world_size, /*equal_counts=*/false, o.node_limit);
    case DispatchAlg::kBinarySearch:
      return search(areas, world_size, /*equal_counts=*/false, o.node_limit);
    case DispatchAlg::kBacktracking:
      return search(areas, world_size, /*equal_counts=*/true, o.node_limit);
    case DispatchAlg::kToppHeap:
      return topp(areas, world_size, keys_of_chunks(bands, chunks), o.num_candidates, 1);
    case DispatchAlg::kBatchToppHeap:
      return topp(areas, world_size, keys_of_chunks(bands, chunks), o.num_candidates, o.batch);
    case DispatchAlg::kRandom: {
      uint64_t state = o.seed;
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[next_random(state) % i]);
      return blocks(order, world_size);
    }
    case DispatchAlg::kSortedSequential:
      return sorted_sequential(areas, world_size, bands, chunk_size, o.ratio_ppm);
  }
  throw std::invalid_argument("alg must be in [0, " + to_string(kNumDispatchAlgs) + "), got " +
                              to_string(static_cast<int32_t>(o.alg)));
}

}  // namespace magi
