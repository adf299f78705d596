#include "host/dispatch_locality.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "host/transfer.h"

namespace magi {
namespace {

size_t at(int32_t i) { return static_cast<size_t>(i); }

}  // namespace

std::vector<int32_t> dispatch_locality(std::span<int64_t const> areas, int32_t world, std::span<Band const> bands,
                                       std::span<Range const> chunks, DispatchOptions const& o) {
  auto const n = static_cast<int32_t>(areas.size());
  std::vector<std::vector<Range>> keys(at(n)), held(at(world));
  if (bands.empty()) {
    for (int32_t c = 0; c < n; ++c) keys[at(c)] = {{c, c + 2}};  // a chunk shares with its neighbours
  } else {
    for (RowPiece const& piece : clip_to_runs(bands, chunks)) {
      keys[at(piece.run)].push_back({piece.band.k0, piece.band.k1});
    }
    for (auto& list : keys) list = merged(std::move(list));
  }
  std::vector<int32_t> order(at(n)), out(at(n)), count(at(world), 0);
  std::vector<int64_t> load(at(world), 0);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return areas[at(a)] > areas[at(b)]; });
  int32_t const floor = n / world;
  int32_t extra = n % world;
  for (int32_t const c : order) {
    int64_t const tokens = num_tokens(keys[at(c)]);
    std::tuple<__int128, int64_t, int32_t> best{-1, 0, 0};
    for (int32_t r = 0; r < world; ++r) {
      if (count[at(r)] > floor || (count[at(r)] == floor && extra == 0)) continue;
      int64_t const fresh = tokens - num_tokens(intersection(held[at(r)], keys[at(c)]));
      __int128 const cost = static_cast<__int128>(load[at(r)] + areas[at(c)]) * o.pair_cost_fs +
                            static_cast<__int128>(fresh) * o.token_cost_fs;
      std::tuple<__int128, int64_t, int32_t> const now{cost, count[at(r)], r};
      if (std::get<0>(best) < 0 || now < best) best = now;
    }
    int32_t const r = std::get<2>(best);
    if (count[at(r)] == floor) --extra;
    ++count[at(r)];
    load[at(r)] += areas[at(c)];
    out[at(c)] = r;
    auto& mine = held[at(r)];
    mine.insert(mine.end(), keys[at(c)].begin(), keys[at(c)].end());
    mine = merged(std::move(mine));
  }
  return out;
}

}  // namespace magi
