#include "host/dispatch_locality.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "host/transfer.h"

namespace magi {
namespace {

using Wide = __int128;

size_t at(int32_t i) { return static_cast<size_t>(i); }

// Everything the search looks at. Keys are counted in whole chunks: chunk c stands for the keys of its own rows.
struct Problem {
  int32_t num_chunks, world;
  std::span<int64_t const> areas;
  std::vector<int64_t> tokens;            // of each chunk
  std::vector<std::vector<Range>> reach;  // chunks whose keys each chunk sees, as ranges of chunk ids
  std::vector<int64_t> reach_size;        // number of them: what looking at a chunk costs
  std::vector<int32_t> segment;           // part of the sequence, ascending; bands do not leave a part
  int64_t total_area = 0, total_tokens = 0;

  int32_t count_of(int32_t rank) const { return num_chunks / world + (rank < num_chunks % world ? 1 : 0); }
};

// [first, last] chunk that touches tokens [begin, end); chunks are sorted and disjoint.
Range chunks_touching(std::span<Range const> chunks, Range keys) {
  auto const first =
      std::upper_bound(chunks.begin(), chunks.end(), keys.begin, [](int32_t k, Range const& c) { return k < c.end; });
  auto const last =
      std::lower_bound(chunks.begin(), chunks.end(), keys.end, [](Range const& c, int32_t k) { return c.begin < k; });
  return {static_cast<int32_t>(first - chunks.begin()), static_cast<int32_t>(last - chunks.begin())};
}

Problem make_problem(std::span<int64_t const> areas, int32_t world, std::span<Band const> bands,
                     std::span<Range const> chunks) {
  Problem p;
  p.num_chunks = static_cast<int32_t>(areas.size());
  p.world = world;
  p.areas = areas;
  p.total_area = std::accumulate(areas.begin(), areas.end(), int64_t{0});
  p.tokens.assign(areas.size(), 1);
  p.reach.resize(areas.size());
  p.segment.assign(areas.size(), 0);
  if (bands.empty()) {
    for (int32_t c = 0; c < p.num_chunks; ++c) p.reach[at(c)] = {{std::max(0, c - 1), std::min(c + 2, p.num_chunks)}};
    p.total_tokens = p.num_chunks;
    for (auto const& reach : p.reach) p.reach_size.push_back(num_tokens(reach));
    return p;
  }
  for (size_t c = 0; c < chunks.size(); ++c) p.tokens[c] = chunks[c].length();
  p.total_tokens = std::accumulate(p.tokens.begin(), p.tokens.end(), int64_t{0});
  std::vector<std::vector<Range>> keys(areas.size());
  for (RowPiece const& piece : clip_to_runs(bands, chunks))
    keys[at(piece.run)].push_back({piece.band.k0, piece.band.k1});
  for (size_t c = 0; c < keys.size(); ++c) {
    for (Range const& r : merged(std::move(keys[c]))) {
      Range const ids = chunks_touching(chunks, r);
      if (!ids.is_empty()) p.reach[c].push_back(ids);
    }
    p.reach[c] = merged(std::move(p.reach[c]));
    p.reach_size.push_back(num_tokens(p.reach[c]));
  }
  // Parts: the union of what each band spans, rows and columns together. A chunk belongs where its middle lies.
  std::vector<Range> spans;
  for (Band const& b : bands) spans.push_back({std::min(b.q0, b.k0), std::max(b.q1, b.k1)});
  std::sort(spans.begin(), spans.end(), [](Range const& a, Range const& b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].begin < spans[kept].end)
      spans[kept].end = std::max(spans[kept].end, spans[i].end);
    else
      spans[++kept] = spans[i];
  }
  spans.resize(kept + 1);
  for (size_t c = 0, s = 0; c < chunks.size(); ++c) {
    int32_t const middle = chunks[c].begin + chunks[c].length() / 2;
    while (s + 1 < spans.size() && spans[s + 1].begin <= middle) ++s;
    p.segment[c] = static_cast<int32_t>(s);
  }
  return p;
}

std::vector<int32_t> sequential(Problem const& p) {
  std::vector<int32_t> out(at(p.num_chunks));
  int32_t c = 0;
  for (int32_t r = 0; r < p.world; ++r) {
    for (int32_t left = p.count_of(r); left > 0; --left) out[at(c++)] = r;
  }
  return out;
}

// Fills rank after rank with chunks in the order given to push(), and says how far the rank is from its share.
class Filler {
 public:
  explicit Filler(Problem const& p) : p_(p), out_(at(p.num_chunks), -1), left_area_(p.total_area), left_(p.num_chunks) {
    start();
  }
  // Below the pro-rata area of the chunks taken so far: the next one should see much.
  bool wants_heavy() const { return Wide{area_} * left_at_start_ <= Wide{area_at_start_} * count_; }
  void push(int32_t chunk) {
    out_[at(chunk)] = rank_;
    area_ += p_.areas[at(chunk)];
    left_area_ -= p_.areas[at(chunk)];
    --left_;
    if (++count_ >= p_.count_of(rank_)) {
      ++rank_;
      start();
    }
  }
  std::vector<int32_t> take() { return std::move(out_); }

 private:
  void start() {
    area_ = 0;
    count_ = 0;
    area_at_start_ = left_area_;
    left_at_start_ = left_;
  }
  Problem const& p_;
  std::vector<int32_t> out_;
  int64_t left_area_, area_ = 0, area_at_start_ = 0;
  int32_t left_, left_at_start_ = 0, rank_ = 0, count_ = 0;
};

std::vector<int32_t> fold(Problem const& p) {
  struct Segment {
    std::vector<int32_t> heavy, light;  // ascending
    Wide surplus = 0;                   // area above the mean, times the number of chunks
  };
  std::vector<Segment> segments(p.segment.empty() ? 0 : at(p.segment.back()) + 1);
  for (int32_t c = 0; c < p.num_chunks; ++c) {
    Segment& s = segments[at(p.segment[at(c)])];
    Wide const above = Wide{p.areas[at(c)]} * p.num_chunks - p.total_area;
    (above > 0 ? s.heavy : s.light).push_back(c);
    s.surplus += above;
  }
  std::vector<size_t> order(segments.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // Parts that can balance themselves first, in sequence; then those that need others, the least needy first.
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::max<Wide>(segments[a].surplus, 0) < std::max<Wide>(segments[b].surplus, 0);
  });
  Filler filler(p);
  std::vector<int32_t> pool;
  size_t pooled = 0;
  bool has_pool = false;
  for (size_t const i : order) {
    Segment& s = segments[i];
    if (s.surplus > 0 && !has_pool) {  // what the balanced parts left over, lightest part first
      has_pool = true;
      std::vector<size_t> givers;
      for (size_t g = 0; g < segments.size(); ++g) {
        if (segments[g].surplus <= 0 && !segments[g].light.empty()) givers.push_back(g);
      }
      auto const mean = [&](size_t g) {
        int64_t sum = 0;
        for (int32_t const c : segments[g].light) sum += p.areas[at(c)];
        return sum / static_cast<int64_t>(segments[g].light.size());
      };
      std::vector<std::pair<int64_t, size_t>> keyed;
      for (size_t const g : givers) keyed.emplace_back(mean(g), g);
      std::sort(keyed.begin(), keyed.end());
      for (auto const& [key, g] : keyed) {
        pool.insert(pool.end(), segments[g].light.begin(), segments[g].light.end());
        segments[g].light.clear();
      }
    }
    for (size_t h = 0; h < s.heavy.size();) {
      if (!filler.wants_heavy() && !s.light.empty()) {
        filler.push(s.light.back());
        s.light.pop_back();
      } else if (!filler.wants_heavy() && pooled < pool.size()) {
        filler.push(pool[pooled++]);
      } else {
        filler.push(s.heavy[h++]);
      }
    }
  }
  for (; pooled < pool.size(); ++pooled) filler.push(pool[pooled]);
  for (Segment& s : segments) {
    for (int32_t const c : s.light) filler.push(c);
  }
  return filler.take();
}

std::vector<int32_t> greedy(Problem const& p, DispatchOptions const& o) {
  std::vector<std::vector<Range>> held(at(p.world));
  std::vector<int32_t> order(at(p.num_chunks)), out(at(p.num_chunks)), count(at(p.world), 0);
  std::vector<int64_t> load(at(p.world), 0);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return p.areas[at(a)] > p.areas[at(b)]; });
  int32_t const floor = p.num_chunks / p.world;
  int32_t extra = p.num_chunks % p.world;
  int64_t const chunk_tokens = std::max<int64_t>(1, p.total_tokens / p.num_chunks);
  for (int32_t const c : order) {
    auto const& keys = p.reach[at(c)];
    int64_t const seen = num_tokens(keys);
    std::tuple<Wide, int32_t, int32_t> best{-1, 0, 0};
    for (int32_t r = 0; r < p.world; ++r) {
      if (count[at(r)] > floor || (count[at(r)] == floor && extra == 0)) continue;
      int64_t const fresh = seen - num_tokens(intersection(held[at(r)], keys));
      Wide const cost =
          Wide{load[at(r)] + p.areas[at(c)]} * o.pair_cost_fs + Wide{fresh} * chunk_tokens * o.token_cost_fs;
      std::tuple<Wide, int32_t, int32_t> const now{cost, count[at(r)], r};
      if (std::get<0>(best) < 0 || now < best) best = now;
    }
    int32_t const r = std::get<2>(best);
    if (count[at(r)] == floor) --extra;
    ++count[at(r)];
    load[at(r)] += p.areas[at(c)];
    out[at(c)] = r;
    auto& mine = held[at(r)];
    mine.insert(mine.end(), keys.begin(), keys.end());
    mine = merged(std::move(mine));
  }
  return out;
}

// A placement with its loads and traffic, kept exact under swaps.
class Placement {
 public:
  Placement(Problem const& p, std::vector<int32_t> rank_of)
      : p_(p),
        rank_of_(std::move(rank_of)),
        cover_(at(p.world) * at(p.num_chunks), 0),
        load_(at(p.world), 0),
        recv_(at(p.world), 0),
        send_(at(p.world), 0),
        readers_(at(p.num_chunks), 0),
        release_(at(p.num_chunks), -1),
        chunks_(at(p.world)) {
    for (int32_t c = 0; c < p.num_chunks; ++c) {
      int32_t const r = rank_of_[at(c)];
      load_[at(r)] += p.areas[at(c)];
      chunks_[at(r)].push_back(c);
      for (Range const& keys : p.reach[at(c)]) {
        for (int32_t k = keys.begin; k < keys.end; ++k) ++cover(r, k);
      }
    }
    for (int32_t r = 0; r < p.world; ++r) {
      for (int32_t k = 0; k < p.num_chunks; ++k) {
        if (cover(r, k) == 0) continue;
        ++readers_[at(k)];
        if (rank_of_[at(k)] == r) continue;
        recv_[at(r)] += p.tokens[at(k)];
        send_[at(rank_of_[at(k)])] += p.tokens[at(k)];
      }
    }
  }

  std::span<int64_t const> loads() const { return load_; }
  std::span<int64_t const> received() const { return recv_; }
  std::span<int64_t const> sent() const { return send_; }
  // Tokens sent for the keys of chunk c, wherever it lies (at most one copy more than that, its own rank's).
  int64_t demand(int32_t c) const { return p_.tokens[at(c)] * readers_[at(c)]; }
  std::span<int32_t const> chunks(int32_t r) const { return chunks_[at(r)]; }
  std::vector<int32_t> const& ranks() const { return rank_of_; }

  // Tokens that rank r would newly receive for chunk c, its own keys not counted.
  int64_t fresh(int32_t r, int32_t c) const {
    int64_t sum = 0;
    for (Range const& keys : p_.reach[at(c)]) {
      uint16_t const* const covered = cover_.data() + at(r) * at(p_.num_chunks);
      for (int32_t k = keys.begin; k < keys.end; ++k) {
        sum += covered[k] == 0 && rank_of_[at(k)] != r ? p_.tokens[at(k)] : 0;
      }
    }
    return sum;
  }

  // Tokens that only chunk c needs on its rank, whoever owns them; kept until the rank changes.
  int64_t release(int32_t c) {
    int64_t& known = release_[at(c)];
    if (known >= 0) return known;
    known = 0;
    int32_t const r = rank_of_[at(c)];
    uint16_t const* const covered = cover_.data() + at(r) * at(p_.num_chunks);
    for (Range const& keys : p_.reach[at(c)]) {
      for (int32_t k = keys.begin; k < keys.end; ++k)
        known += covered[k] == 1 && rank_of_[at(k)] != r ? p_.tokens[at(k)] : 0;
    }
    return known;
  }

  void swap(int32_t a, int32_t b) {
    int32_t const ra = rank_of_[at(a)], rb = rank_of_[at(b)];
    leave(a, ra);
    leave(b, rb);
    enter(a, rb);
    enter(b, ra);
    std::replace(chunks_[at(ra)].begin(), chunks_[at(ra)].end(), a, b);
    std::replace(chunks_[at(rb)].begin(), chunks_[at(rb)].end(), b, a);
    load_[at(ra)] += p_.areas[at(b)] - p_.areas[at(a)];
    load_[at(rb)] += p_.areas[at(a)] - p_.areas[at(b)];
  }
  // After a swap that stays.
  void forget(int32_t r) {
    for (int32_t const c : chunks_[at(r)]) release_[at(c)] = -1;
  }

 private:
  uint16_t& cover(int32_t r, int32_t k) { return cover_[at(r) * at(p_.num_chunks) + at(k)]; }
  // Between leave and enter a chunk has no owner: whoever sees it receives it.
  void leave(int32_t c, int32_t r) {
    send_[at(r)] -= p_.tokens[at(c)] * (readers_[at(c)] - (cover(r, c) > 0));
    rank_of_[at(c)] = -1;
    if (cover(r, c) > 0) recv_[at(r)] += p_.tokens[at(c)];
    for (Range const& keys : p_.reach[at(c)]) {
      for (int32_t k = keys.begin; k < keys.end; ++k) {
        if (--cover(r, k) == 0) count_reader(r, k, -1);
      }
    }
  }
  void enter(int32_t c, int32_t r) {
    rank_of_[at(c)] = r;
    send_[at(r)] += p_.tokens[at(c)] * (readers_[at(c)] - (cover(r, c) > 0));
    if (cover(r, c) > 0) recv_[at(r)] -= p_.tokens[at(c)];
    for (Range const& keys : p_.reach[at(c)]) {
      for (int32_t k = keys.begin; k < keys.end; ++k) {
        if (cover(r, k)++ == 0) count_reader(r, k, 1);
      }
    }
  }
  // Rank r begins (1) or ceases (-1) to read the keys of chunk k.
  void count_reader(int32_t r, int32_t k, int32_t by) {
    readers_[at(k)] += by;
    int32_t const owner = rank_of_[at(k)];
    if (owner == r) return;
    recv_[at(r)] += by * p_.tokens[at(k)];
    if (owner >= 0) send_[at(owner)] += by * p_.tokens[at(k)];
  }

  Problem const& p_;
  std::vector<int32_t> rank_of_;
  std::vector<uint16_t> cover_;
  std::vector<int64_t> load_, recv_, send_;
  std::vector<int32_t> readers_;  // ranks that read each chunk
  std::vector<int64_t> release_;
  std::vector<std::vector<int32_t>> chunks_;
};

// Predicted price of a placement: compute of the fullest rank, slack free of charge, and the transfers of the mean and
// of the busiest receiver or sender, which overlap hides only in part.
Wide score_of(Problem const& p, Placement const& x, int64_t cap, DispatchOptions const& o) {
  auto const load = x.loads(), recv = x.received();
  Wide const most = std::max(cap, *std::max_element(load.begin(), load.end()));
  Wide const sum = std::accumulate(recv.begin(), recv.end(), int64_t{0});
  Wide const busiest = *std::max_element(recv.begin(), recv.end());
  return 2 * p.world * most * o.pair_cost_fs + (sum + p.world * busiest) * o.token_cost_fs;
}

// Swaps one chunk of the fullest rank for a lighter one until it is within the slack, each time the swap that costs
// the fewest received tokens among those that bring the pair closest.
void balance(Problem const& p, Placement& x, int64_t cap, DispatchOptions const& o) {
  int64_t steps = o.node_limit / 4;
  constexpr size_t kTried = 12, kPartners = 40;
  std::vector<int32_t> lightest;
  struct Option {
    int64_t worse;  // larger load of the two, above the cap
    int32_t a, b;
    bool operator<(Option const& o) const { return std::tie(worse, a, b) < std::tie(o.worse, o.a, o.b); }
  };
  std::vector<Option> options;
  for (int32_t round = 0; round < 4 * p.world + 16; ++round) {
    auto const load = x.loads();
    auto const full = static_cast<int32_t>(std::max_element(load.begin(), load.end()) - load.begin());
    int64_t const most = load[at(full)];
    if (most <= cap) return;
    options.clear();
    lightest.resize(at(p.world));
    std::iota(lightest.begin(), lightest.end(), 0);
    size_t const partners = std::min(kPartners, lightest.size());
    std::partial_sort(lightest.begin(), lightest.begin() + static_cast<std::ptrdiff_t>(partners), lightest.end(),
                      [&](int32_t a, int32_t b) { return std::tie(load[at(a)], a) < std::tie(load[at(b)], b); });
    lightest.resize(partners);
    for (int32_t const r : lightest) {
      if (r == full || load[at(r)] >= most) continue;
      for (int32_t const a : x.chunks(full)) {
        for (int32_t const b : x.chunks(r)) {
          if (--steps < 0) return;
          int64_t const moved = p.areas[at(a)] - p.areas[at(b)];
          if (moved <= 0) continue;
          int64_t const larger = std::max(most - moved, load[at(r)] + moved);
          if (larger < most) options.push_back({std::max<int64_t>(0, larger - cap), a, b});
        }
      }
    }
    if (options.empty()) return;
    size_t const tried = std::min(kTried, options.size());
    std::partial_sort(options.begin(), options.begin() + static_cast<std::ptrdiff_t>(tried), options.end());
    size_t best = 0;
    Wide best_cost = -1;
    for (size_t i = 0; i < tried; ++i) {
      auto const [worse, a, b] = options[i];
      int32_t const ra = x.ranks()[at(a)], rb = x.ranks()[at(b)];
      int64_t const before = x.received()[at(ra)] + x.received()[at(rb)];
      steps -= 8 * (p.reach_size[at(a)] + p.reach_size[at(b)]);
      x.swap(a, b);
      int64_t const more = x.received()[at(ra)] + x.received()[at(rb)] - before;
      x.swap(a, b);
      Wide const cost = Wide{worse} * o.pair_cost_fs + Wide{more + p.total_tokens} * o.token_cost_fs;
      if (best_cost < 0 || cost < best_cost) {
        best_cost = cost;
        best = i;
      }
    }
    x.swap(options[best].a, options[best].b);
  }
}

// Moves chunks to ranks that read most of their keys already, in exchange for a chunk of theirs, while no rank's area
// passes the larger of the slack and what was largest before. Receivers and senders far above the mean weigh more.
void gather(Problem const& p, Placement& x, int64_t cap, int64_t steps) {
  constexpr size_t kRanksTried = 3;
  auto const largest = [](std::span<int64_t const> v) { return *std::max_element(v.begin(), v.end()); };
  int64_t const bound = std::max(cap, largest(x.loads()));
  int64_t const mean = std::accumulate(x.received().begin(), x.received().end(), int64_t{0}) / p.world;
  auto const price = [&](int32_t r) {
    int64_t const recv = x.received()[at(r)];
    return recv + 2 * std::max<int64_t>(0, recv - mean - mean / 2) +
           2 * std::max<int64_t>(0, x.sent()[at(r)] - mean - mean / 3);
  };
  std::vector<std::pair<int64_t, int32_t>> hosts;
  std::vector<int32_t> theirs;
  for (int sweep = 0; sweep < 4; ++sweep) {
    bool changed = false;
    for (int32_t a = 0; a < p.num_chunks; ++a) {
      int32_t const from = x.ranks()[at(a)];
      if (x.received()[at(from)] == 0) continue;
      hosts.clear();
      for (int32_t r = 0; r < p.world; ++r) {
        if (r == from) continue;
        hosts.emplace_back(x.fresh(r, a), r);
      }
      if ((steps -= p.world * p.reach_size[at(a)]) < 0) return;
      size_t const tried = std::min(kRanksTried, hosts.size());
      std::partial_sort(hosts.begin(), hosts.begin() + static_cast<std::ptrdiff_t>(tried), hosts.end());
      int64_t const relief = x.sent()[at(from)] > mean + mean / 3 ? 2 * x.demand(a) : 0;
      int64_t best = 0;
      int32_t partner = -1;
      for (size_t i = 0; i < tried; ++i) {
        int32_t const to = hosts[i].second;
        int64_t const room_from = bound - x.loads()[at(from)] + p.areas[at(a)];
        int64_t const room_to = bound - x.loads()[at(to)] - p.areas[at(a)];
        // What the exchange can save at most, before the chunk that comes back is known.
        int64_t const most = x.release(a) - hosts[i].first + p.tokens[at(a)];
        // swap() changes the list, so walk a copy.
        theirs.assign(x.chunks(to).begin(), x.chunks(to).end());
        if ((steps -= static_cast<int64_t>(theirs.size())) < 0) return;
        for (int32_t const b : theirs) {
          if (p.areas[at(b)] > room_from || -p.areas[at(b)] > room_to) continue;
          if (3 * (most + x.release(b) + p.tokens[at(b)]) + relief <= best) continue;
          if ((steps -= 4 * (p.reach_size[at(a)] + p.reach_size[at(b)])) < 0) return;
          int64_t const before = price(from) + price(to);
          x.swap(a, b);
          int64_t const gain = before - price(from) - price(to);
          x.swap(a, b);
          if (gain > best) {
            best = gain;
            partner = b;
          }
        }
      }
      if (partner < 0) continue;
      int32_t const to = x.ranks()[at(partner)];
      x.swap(a, partner);
      x.forget(from);
      x.forget(to);
      changed = true;
    }
    if (!changed) return;
  }
}

}  // namespace

std::vector<int32_t> dispatch_locality(std::span<int64_t const> areas, int32_t world, std::span<Band const> bands,
                                       std::span<Range const> chunks, DispatchOptions const& o) {
  Problem const p = make_problem(areas, world, bands, chunks);
  if (world == 1) return std::vector<int32_t>(areas.size(), 0);
  Wide const slack = Wide{p.total_area} * (1'000'000 + o.balance_ppm) / (Wide{1'000'000} * world);
  int64_t const cap = std::max(static_cast<int64_t>(std::min<Wide>(slack, std::numeric_limits<int64_t>::max() / 4)),
                               dispatch_lower_bound(areas, world));
  std::vector<std::vector<int32_t>> layouts{fold(p)};
  // Beyond this, knowing who sees what costs more than placing better would save.
  constexpr int64_t kMaxCells = int64_t{1} << 26;
  int64_t const seen = std::accumulate(p.reach_size.begin(), p.reach_size.end(), int64_t{0});
  if (p.num_chunks > 1 << 15 || seen > kMaxCells || int64_t{p.num_chunks} * world > kMaxCells)
    return std::move(layouts[0]);
  // Blocks that are far from balanced would be taken apart by the repair: worth its time only where that is short.
  auto blocks = sequential(p);
  std::vector<int64_t> load(at(world), 0);
  for (size_t c = 0; c < blocks.size(); ++c) load[at(blocks[c])] += areas[c];
  int64_t const worst = *std::max_element(load.begin(), load.end());
  if (worst <= cap + cap / 4 || (p.num_chunks <= 256 && worst <= 4 * cap)) layouts.push_back(std::move(blocks));
  if (p.num_chunks <= 4096 && int64_t{p.num_chunks} * world <= 1 << 16) layouts.push_back(greedy(p, o));
  std::vector<int32_t> best;
  Wide best_score = 0;
  for (auto& layout : layouts) {
    Placement x(p, std::move(layout));
    balance(p, x, cap, o);
    Wide const now = score_of(p, x, cap, o);
    if (best.empty() || now < best_score) {
      best = x.ranks();
      best_score = now;
    }
  }
  Placement x(p, std::move(best));
  gather(p, x, cap, std::min<int64_t>(o.node_limit, 100'000 + int64_t{64} * p.num_chunks));  // about 5 ms
  return x.ranks();
}

}  // namespace magi
