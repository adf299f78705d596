// Attention forward, sm90:  out = softmax(score(q k^T) + mask) v, lse in float32; the mask is data, a FlexPlan.
//
// Persistent CTAs take (query tile, query head) pairs from a queue. Warpgroup 0 is the loader: one warp reads the plan
// and lets the copy engine bring Q, K and V tiles straight from the token-major tensors. Warpgroups 1 and 2 multiply,
// 64 query rows each: while the tensor cores compute Q K^T of the next step and P V of this one for one of them, the
// other does its exponentials (they pass a named barrier to and fro), and inside one warpgroup the softmax of step
// n + 1 runs under P V of step n. P stays in registers. Each output row is written once.
//
// Source: FlashAttention-3 (arXiv:2407.08608), algorithm 2. Differs in: steps come from a plan and each carries its
// mask (none, a band, a bit matrix), so no mask type is compiled in; the output is rescaled only when a row's maximum
// has grown by more than 8 binary orders (the idea of FlashAttention-4), since exactness does not need the true
// maximum; a tile may continue from an earlier stage's state.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "magi/attn/element.cuh"
#include "magi/attn/params.h"
#include "magi/attn/score.cuh"
#include "magi/plan_format.h"
#include "magi/ptx/mbarrier.cuh"
#include "magi/ptx/tma.cuh"
#include "magi/ptx/wgmma.cuh"

namespace magi::attn {

template <class Element_, int kHeadDim_, int kHeadDimV_, class Score_, int kBlockN_ = 0>
struct FwdTraits {
  using Element = Element_;
  using Score = Score_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kStages = 2;
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0, "a head dim must fill whole 64-element swizzle blocks");
  static constexpr int kBlockM = 128;
  // 160 up to head dim 128: beside FA3 full 16k 0.99 of it, where 128 gave 0.88 and 176 (which spills more) 0.98.
  static constexpr int kBlockN = kBlockN_ > 0       ? kBlockN_
                                 : kHeadDim <= 128  ? 160
                                 : kHeadDimV <= 128 ? 128
                                 : kHeadDim <= 192  ? 112
                                                    : 80;
  static constexpr int kTileBytes = 2 * (kBlockM * kHeadDim + kStages * kBlockN * (kHeadDim + kHeadDimV));
  // The next tile's queries are loaded under this one's last steps where shared memory allows.
  static constexpr int kQSlots = kTileBytes + 2 * kBlockM * kHeadDim + 4096 <= 232448 ? 2 : 1;
  static constexpr int kMultipliers = 2, kThreads = 128 * (1 + kMultipliers);
  static constexpr int kLoaderRegisters = 40, kMultiplierRegisters = 232;
  static_assert(128 * (kLoaderRegisters + kMultipliers * kMultiplierRegisters) <= 65536, "the register file is full");
};

struct FwdMaps {
  CUtensorMap q, k, v;  // (dim, token, head); boxes of 64 x kBlockM, 64 x kBlockN, 64 x kBlockN
};

// One step of a tile: what the multipliers must know of a key tile.
struct alignas(16) FwdStep {
  int col0, num_cols;  // first key; keys past num_cols are not this step's
  int job_class;
  int a, b;    // one band: lo, hi. many: word offset of the bit matrix in the plan, its column at col0
  int q0, q1;  // one band: its rows
  int unused;
};

struct alignas(16) FwdWork {
  int row0, num_rows;  // query rows of the tile
  int head, flags;
  int num_steps;  // -1: no more work
  int split, num_splits, split_slot;
};

// Jobs of one tile, read from the plan ahead of their use. A long list comes in several batches.
inline constexpr int kBatchJobs = 16;
struct alignas(16) FwdBatch {
  FwdWork work;
  int num_jobs;
  bool is_first, is_last;  // of its tile
  struct alignas(16) Job {
    int begin, end;               // keys, cut to the item
    int job_class, a, b, q0, q1;  // as in FwdStep, b of a bit matrix counted at begin
    int unused;
  } jobs[kBatchJobs];
};

template <class T>
struct FwdKernel {
  using Element = typename T::Element;
  static constexpr int kM = T::kBlockM, kN = T::kBlockN, kD = T::kHeadDim, kDv = T::kHeadDimV;
  static constexpr uint32_t kQBytes = kM * kD * 2, kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
  static constexpr int kQWarps = 4 * T::kMultipliers, kBatches = 2;

  struct SharedStorage {
    alignas(1024) uint8_t q[T::kQSlots][kQBytes];
    alignas(1024) uint8_t k[T::kStages][kKBytes];
    alignas(1024) uint8_t v[T::kStages][kVBytes];
    FwdStep steps[T::kStages];
    FwdWork works[T::kQSlots];
    FwdBatch batches[kBatches];
    bool is_last_arriver[T::kMultipliers];
    alignas(8) uint64_t q_full[T::kQSlots], q_empty[T::kQSlots];
    uint64_t batch_full[kBatches], batch_empty[kBatches];
    uint64_t k_full[T::kStages], k_empty[T::kStages], v_full[T::kStages], v_empty[T::kStages];
  };
  static_assert(sizeof(SharedStorage) <= 232448, "more shared memory than a CTA may have");

  enum Barrier : int { kTurn = 1, kGroup = kTurn + T::kMultipliers };  // named barriers, one a multiplier each

  // ---- planner: one warp of warpgroup 0 takes items from the queue and reads their jobs ----------------------------

  __device__ static void plan_ahead(SharedStorage& s, FwdParams const& p) {
    int const lane = threadIdx.x % 32;
    int32_t const* const plan = p.plan;
    int const num_items = plan[plan::kNumFwdItems];
    auto const* const items = reinterpret_cast<plan::Item const*>(plan + plan[plan::kFwdItems]);
    auto const* const tiles = reinterpret_cast<plan::Tile const*>(plan + plan[plan::kFwdTiles]);
    auto const* const jobs = reinterpret_cast<plan::Job const*>(plan + plan[plan::kFwdJobs]);
    auto const* const bands = reinterpret_cast<plan::Band const*>(plan + plan[plan::kBands]);
    int const masks = plan[plan::kMasks];
    int const group = p.num_heads_q / p.num_heads_kv;
    int const section_kv =
        plan[plan::kSectionHeads] > 0 ? min(plan[plan::kSectionHeads], p.num_heads_kv) : p.num_heads_kv;
    int const section_size = num_items * section_kv * group;
    int const total = num_items * p.num_heads_q;
    ptx::RingState<kBatches> ring;

    for (int position = blockIdx.x; position < total;) {
      int next = 0;
      if (lane == 0) next = atomicAdd(p.counter, 1) + gridDim.x;
      int const section = position / section_size, in_section = position - section * section_size;
      int const section_heads = min(section_kv, p.num_heads_kv - section * section_kv) * group;
      int const item_index = in_section / section_heads;
      int const head = section * section_kv * group + in_section - item_index * section_heads;
      plan::Item const item = items[item_index];
      plan::Tile const tile = tiles[item.tile];

      int num_steps = 0;
      for (int index = item.job_begin + lane; index < item.job_end; index += 32) {
        int const begin = max(jobs[index].begin, item.clip_begin), end = min(jobs[index].end, item.clip_end);
        num_steps += max(0, end - begin + kN - 1) / kN;
      }
      num_steps = __reduce_add_sync(0xffffffffu, num_steps);

      int first = item.job_begin;
      do {
        FwdBatch& batch = s.batches[ring.slot];
        int const index = first + lane;
        bool const has_job = lane < kBatchJobs && index < item.job_end;
        typename FwdBatch::Job ahead{};
        if (has_job) {
          plan::Job const job = jobs[index];
          ahead.begin = max(job.begin, item.clip_begin), ahead.end = min(job.end, item.clip_end);
          ahead.job_class = job.job_class;
          if (job.job_class == plan::kOneBand) {
            plan::Band const band = bands[job.index];
            ahead.a = band.lo, ahead.b = band.hi, ahead.q0 = band.q0, ahead.q1 = band.q1;
          } else {
            ahead.a = masks + job.index * plan::kMaskWords, ahead.b = ahead.begin - job.begin;
          }
        }
        ptx::mbarrier_wait(&s.batch_empty[ring.slot], ring.phase ^ 1);
        if (has_job) batch.jobs[lane] = ahead;
        if (lane == 0) {
          batch.work = FwdWork{tile.begin, tile.end - tile.begin, head,           tile.flags, num_steps,
                               item.split, tile.num_splits,       tile.split_slot};
          batch.num_jobs = min(kBatchJobs, item.job_end - first);
          batch.is_first = first == item.job_begin, batch.is_last = first + kBatchJobs >= item.job_end;
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&s.batch_full[ring.slot]);
        ring.advance();
        first += kBatchJobs;
      } while (first < item.job_end);
      position = __shfl_sync(0xffffffffu, next, 0);
    }
    ptx::mbarrier_wait(&s.batch_empty[ring.slot], ring.phase ^ 1);
    if (lane == 0) {
      s.batches[ring.slot].work.num_steps = -1;
      ptx::mbarrier_arrive(&s.batch_full[ring.slot]);
    }
  }

  // ---- loader: one thread of warpgroup 0 keeps the copy engine busy ------------------------------------------------

  __device__ static void load(SharedStorage& s, FwdParams const& p, FwdMaps const& maps) {
    int const group = p.num_heads_q / p.num_heads_kv;
    ptx::RingState<T::kStages> k_ring, v_ring;
    ptx::RingState<T::kQSlots> q_ring;
    ptx::RingState<kBatches> ring;
    bool is_first_step = true;
    int previous_col0 = 0, kv_head = 0;

    auto load_v = [&] {
      ptx::mbarrier_wait(&s.v_empty[v_ring.slot], v_ring.phase ^ 1);
      uint64_t* const full = &s.v_full[v_ring.slot];
      ptx::mbarrier_arrive_expect(full, kVBytes);
#pragma unroll
      for (int c = 0; c < kDv / 64; ++c) {
        ptx::tma_load_3d(s.v[v_ring.slot] + c * kN * 128, &maps.v, full, c * 64, previous_col0, kv_head);
      }
      v_ring.advance();
    };
    auto load_q = [&](FwdWork const& work) {
      ptx::mbarrier_wait(&s.q_empty[q_ring.slot], q_ring.phase ^ 1);
      s.works[q_ring.slot] = work;
      uint64_t* const full = &s.q_full[q_ring.slot];
      if (work.num_steps > 0) {
        ptx::mbarrier_arrive_expect(full, kQBytes);
#pragma unroll
        for (int c = 0; c < kD / 64; ++c) {
          ptx::tma_load_3d(s.q[q_ring.slot] + c * kM * 128, &maps.q, full, c * 64, work.row0, work.head);
        }
      } else {
        ptx::mbarrier_arrive(full);
      }
      q_ring.advance();
    };

    while (true) {
      ptx::mbarrier_wait(&s.batch_full[ring.slot], ring.phase);
      FwdBatch const& batch = s.batches[ring.slot];
      FwdWork const work = batch.work;
      if (work.num_steps <= 0) load_q(work);
      if (work.num_steps < 0) break;
      if (batch.is_first) is_first_step = true, kv_head = work.head / group;
      for (int j = 0; j < batch.num_jobs; ++j) {
        auto const job = batch.jobs[j];
        for (int col0 = job.begin; col0 < job.end; col0 += kN) {
          ptx::mbarrier_wait(&s.k_empty[k_ring.slot], k_ring.phase ^ 1);
          int const b = job.job_class == plan::kMany ? job.b + col0 - job.begin : job.b;
          s.steps[k_ring.slot] = FwdStep{col0, min(kN, job.end - col0), job.job_class, job.a, b, job.q0, job.q1, 0};
          uint64_t* const full = &s.k_full[k_ring.slot];
          ptx::mbarrier_arrive_expect(full, kKBytes);
#pragma unroll
          for (int c = 0; c < kD / 64; ++c) {
            ptx::tma_load_3d(s.k[k_ring.slot] + c * kN * 128, &maps.k, full, c * 64, col0, kv_head);
          }
          k_ring.advance();
          if (is_first_step) {
            load_q(work);
            is_first_step = false;
          } else {
            load_v();
          }
          previous_col0 = col0;
        }
      }
      bool const is_last = batch.is_last;
      ptx::mbarrier_arrive(&s.batch_empty[ring.slot]);
      ring.advance();
      if (is_last && work.num_steps > 0) load_v();
    }
  }

  // ---- multipliers -----------------------------------------------------------------------------------------------

  // A thread's accumulators: element i is row (lane / 4) + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i
  // % 2.
  static constexpr int kScores = kN / 2, kOuts = kDv / 2;

  __device__ static __forceinline__ void issue_qk(float (&scores)[kScores], uint32_t q, uint32_t k) {
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint64_t const a = ptx::wgmma_descriptor(q + (i / 4) * kM * 128 + (i % 4) * 32);
      uint64_t const b = ptx::wgmma_descriptor(k + (i / 4) * kN * 128 + (i % 4) * 32);
      ptx::Wgmma<Element, kN>::template ss<0, 0>(scores, a, b, i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ static __forceinline__ void issue_pv(float (&out)[kOuts], uint32_t (&probs)[kScores / 2], uint32_t v) {
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      uint32_t const a[4] = {probs[4 * i], probs[4 * i + 1], probs[4 * i + 2], probs[4 * i + 3]};
      ptx::Wgmma<Element, kDv>::template rs<1>(out, a, ptx::wgmma_descriptor(v + i * 2048, kN * 128), 1);
    }
    ptx::wgmma_commit();
  }

  // Volatile: hoisting the loads of a whole mask costs registers that the accumulators need.
  __device__ static __forceinline__ uint32_t load_word(int32_t const* p) {
    uint32_t x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
  }

  __device__ static __forceinline__ void apply_mask(float (&scores)[kScores], FwdStep const& step, int32_t const* plan,
                                                    int row0, int row_in_tile) {
    int const lane_col = 2 * (threadIdx.x % 4);
    if (step.job_class == plan::kMany) {  // bits past the job's keys are zero
      int const shift = step.b + lane_col;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int32_t const* const row = plan + step.a + (row_in_tile + 8 * h) * 4 + shift / 32;
        int const words = 4 - shift / 32;
        uint32_t low = words > 0 ? load_word(row) : 0;
#pragma unroll
        for (int w = 0; w < (kN + 31) / 32; ++w) {
          uint32_t const high = w + 1 < words ? load_word(row + w + 1) : 0;
          uint32_t const bits = __funnelshift_r(low, high, shift % 32);
          low = high;
#pragma unroll
          for (int c = 32 * w; c < 32 * w + 32 && c < kN; c += 8) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = scores[c / 8 * 4 + 2 * h + e];
              x = (bits >> (c % 32 + e) & 1) != 0 ? x : -INFINITY;
            }
          }
        }
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int first = 0, last = step.num_cols - 1;
      if (step.job_class == plan::kOneBand) {
        int const row = row0 + row_in_tile + 8 * h;
        first = row + step.a - step.col0;
        last = min(last, row + step.b - step.col0);
        if (row < step.q0 || row >= step.q1) last = -1;
      }
      first -= lane_col, last -= lane_col;
#pragma unroll
      for (int c = 0; c < kN; c += 8) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[c / 8 * 4 + 2 * h + e];
          x = c + e >= first && c + e <= last ? x : -INFINITY;
        }
      }
    }
  }

  struct Rows {          // of one thread: its two rows
    float reference[2];  // what exponents are relative to, base 2, scaled; -inf before the first key
    float largest[2];    // true maximum, unscaled
    float sum[2];        // of this thread's columns, relative to reference
    float rescale[2];    // factor that out still needs
  };

  // Scores become probabilities relative to the reference; true when out must be rescaled before the next product.
  __device__ static __forceinline__ bool softmax(float (&scores)[kScores], Rows& rows, float scale_log2) {
    bool grew = false;
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = scores[2 * h];
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) x = fmaxf(x, fmaxf(scores[i], scores[i + 1]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      rows.largest[h] = fmaxf(rows.largest[h], x);
      top[h] = x * scale_log2;
      grew |= top[h] > rows.reference[h] + 8.0f;  // also true for the first key of a row; false for none
    }
    grew = __any_sync(0xffffffffu, grew);
    if (grew) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float const reference = fmaxf(rows.reference[h], top[h]);
        rows.rescale[h] = reference == -INFINITY ? 1.0f : exp2_approx(rows.reference[h] - reference);
        rows.sum[h] *= rows.rescale[h];
        rows.reference[h] = reference;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const reference = rows.reference[h] == -INFINITY ? 0.0f : rows.reference[h];
      float sum = 0.0f;
#pragma unroll
      for (int i = 2 * h; i < kScores; i += 4) {
        scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -reference));
        scores[i + 1] = exp2_approx(fmaf(scores[i + 1], scale_log2, -reference));
        sum += scores[i] + scores[i + 1];
      }
      rows.sum[h] += sum;
    }
    return grew;
  }

  __device__ static __forceinline__ void pack_probs(uint32_t (&probs)[kScores / 2], float const (&scores)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
  }

  // Rows of v past the step's keys belong to others and may hold NaN, and 0 * NaN is NaN: clear them. (Every key inside
  // a job is covered, so finite by contract.)
  __device__ static __forceinline__ void clear_tail(uint8_t* v, int num_cols, int group) {
    for (int i = num_cols * 8 + threadIdx.x % 128; i < kN * 8; i += 128) {
#pragma unroll
      for (int c = 0; c < kDv / 64; ++c) reinterpret_cast<uint4*>(v + c * kN * 128)[i] = uint4{0, 0, 0, 0};
    }
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroup + group, 128);
  }

  __device__ static __forceinline__ float sink_lse(FwdParams const& p, int64_t row, int head) {
    float const* const sink = p.sink + (p.is_sink_per_token ? row * p.num_sinks * p.num_heads_q : 0) + head;
    float top = -INFINITY, sum = 0.0f;
    for (int i = 0; i < p.num_sinks; ++i) top = fmaxf(top, sink[int64_t(i) * p.num_heads_q]);
    if (isinf(top)) return top;
    for (int i = 0; i < p.num_sinks; ++i) sum += exp2f((sink[int64_t(i) * p.num_heads_q] - top) * kLog2e);
    return top + logf(sum);
  }

  __device__ static void multiply(SharedStorage& s, FwdParams const& p, int group) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int const row_in_tile = 64 * group + 16 * warp + lane / 4;
    typename T::Score const score(p.softmax_scale, p.softcap);
    float const scale_log2 = score.log2();
    ptx::RingState<T::kStages> k_ring, v_ring;
    ptx::RingState<T::kQSlots> q_ring;
    if (group == 1) ptx::named_barrier_arrive(kTurn, 256);  // the first turn is warpgroup 0's

    auto release = [&](uint64_t* barrier) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    };

    while (true) {
      ptx::mbarrier_wait(&s.q_full[q_ring.slot], q_ring.phase);
      uint64_t* const q_empty = &s.q_empty[q_ring.slot];
      uint32_t const q_address = ptx::smem_address(s.q[q_ring.slot]) + group * 64 * 128;
      FwdWork const work = s.works[q_ring.slot];
      q_ring.advance();
      if (work.num_steps < 0) break;

      float out[kOuts];
      Rows rows;
      bool is_dead[2] = {false, false};  // a sink of +inf took the row in an earlier stage
      bool const continues = (work.flags & plan::kFirst) == 0 && work.split == 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        rows.reference[h] = rows.largest[h] = -INFINITY;
        rows.sum[h] = 0.0f;
        rows.rescale[h] = 1.0f;
      }
#pragma unroll
      for (int i = 0; i < kOuts; ++i) out[i] = 0.0f;
      if (continues) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row_in_tile + 8 * h >= work.num_rows) continue;
          int64_t const row = work.row0 + row_in_tile + 8 * h;
          float const lse = p.lse[row * p.lse_strides[0] + work.head * p.lse_strides[1]];
          is_dead[h] = lse == INFINITY;
          if (!isinf(lse)) rows.reference[h] = lse * kLog2e, rows.sum[h] = lane % 4 == 0 ? 1.0f : 0.0f;
          float const* const acc = p.out_acc + row * p.out_acc_strides[0] + work.head * p.out_acc_strides[1];
#pragma unroll
          for (int c = 0; c < kDv; c += 8) {
            int const col = c + 2 * (lane % 4);
            if (col < p.head_dim_v) {
              float2 const x = *reinterpret_cast<float2 const*>(acc + col);
              out[c / 2 + 2 * h] = x.x, out[c / 2 + 2 * h + 1] = x.y;
            }
          }
        }
      }

      if (work.num_steps == 0) {
        release(q_empty);
      } else {
        float scores[kScores];
        uint32_t probs[kScores / 2];
        int v_cols;  // keys of the step whose P V comes next

        // Scores of the step in slot k_ring, already multiplied, become probabilities.
        auto finish_scores = [&] {
          FwdStep const& step = s.steps[k_ring.slot];
          if constexpr (!T::Score::kIsIdentity) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) scores[i] = score(scores[i]);
          }
          int const job_class = step.job_class, num_cols = step.num_cols;
          if (job_class != plan::kFull || num_cols < kN) apply_mask(scores, step, p.plan, work.row0, row_in_tile);
          v_cols = num_cols;
          release(&s.k_empty[k_ring.slot]);
          k_ring.advance();
          return softmax(scores, rows, scale_log2);
        };
        auto start_pv = [&] {
          ptx::mbarrier_wait(&s.v_full[v_ring.slot], v_ring.phase);
          if (v_cols < kN) clear_tail(s.v[v_ring.slot], v_cols, group);
          ptx::wgmma_fence();
          issue_pv(out, probs, ptx::smem_address(s.v[v_ring.slot]));
        };
        auto finish_pv = [&] {
          release(&s.v_empty[v_ring.slot]);
          v_ring.advance();
        };

        ptx::mbarrier_wait(&s.k_full[k_ring.slot], k_ring.phase);
        ptx::wgmma_pin(scores);
        ptx::wgmma_fence();
        issue_qk(scores, q_address, ptx::smem_address(s.k[k_ring.slot]));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);
        if (work.num_steps == 1) release(q_empty);
        if (finish_scores()) {
#pragma unroll
          for (int i = 0; i < kOuts; ++i) out[i] *= rows.rescale[i / 2 % 2];
        }
        pack_probs(probs, scores);

#pragma unroll 1
        for (int n = 1; n < work.num_steps; ++n) {
          ptx::mbarrier_wait(&s.k_full[k_ring.slot], k_ring.phase);
          ptx::named_barrier_sync(kTurn + group, 256);
          ptx::wgmma_pin(scores);
          ptx::wgmma_pin(out);
          ptx::wgmma_pin(probs);
          ptx::wgmma_fence();
          issue_qk(scores, q_address, ptx::smem_address(s.k[k_ring.slot]));
          start_pv();
          ptx::named_barrier_arrive(kTurn + (group ^ 1), 256);
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(scores);
          if (n == work.num_steps - 1) release(q_empty);
          bool const grew = finish_scores();
          if constexpr (kDv > 128) {
            // Never taken. ptxas would otherwise wait for P V before the exponentials; up to head dim 128 that is
            // better (682 against 630 TFLOP/s), since the other warpgroup's products fill the gap.
            if (rows.sum[0] + rows.sum[1] < 0.0f) __trap();
          }
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(out);
          ptx::wgmma_pin(probs);
          finish_pv();
          pack_probs(probs, scores);
          if (grew) {
#pragma unroll
            for (int i = 0; i < kOuts; ++i) out[i] *= rows.rescale[i / 2 % 2];
          }
        }
        ptx::wgmma_pin(out);
        ptx::wgmma_pin(probs);
        start_pv();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(out);
        finish_pv();
      }
      bool is_whole = true;
      if (work.num_splits > 1) is_whole = merge_splits(s, p, work, out, rows, is_dead, row_in_tile, group);
      if (is_whole) store(p, work, out, rows, is_dead, score.natural(), row_in_tile);
    }
  }

  // A part of a split tile leaves its state in the workspace. The last part to arrive gathers all of them in order,
  // so that results do not depend on who was last, and returns true.
  __device__ static __forceinline__ bool merge_splits(SharedStorage& s, FwdParams const& p, FwdWork const& work,
                                                      float (&out)[kOuts], Rows& rows, bool (&is_dead)[2],
                                                      int row_in_tile, int group) {
    int const thread = threadIdx.x % 128;
    int const first = work.split_slot * p.num_heads_q + work.head;  // of num_splits, num_heads_q apart
    if (first + (work.num_splits - 1) * p.num_heads_q >= p.split_capacity) __trap();  // plan for a larger device
    constexpr int kWords = kOuts + 8, kSlotWords = kWords * 128 * T::kMultipliers;
    auto const part = [&](int split) {  // a thread's words, 128 apart
      return p.split_workspace + (int64_t(first) + int64_t(split) * p.num_heads_q) * kSlotWords + group * kWords * 128 +
             thread;
    };
    float* const mine = part(work.split);
#pragma unroll
    for (int i = 0; i < kOuts; ++i) __stcg(mine + i * 128, out[i]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      __stcg(mine + (kOuts + h) * 128, rows.reference[h]);
      __stcg(mine + (kOuts + 2 + h) * 128, sum);
      __stcg(mine + (kOuts + 4 + h) * 128, rows.largest[h]);
      __stcg(mine + (kOuts + 6 + h) * 128, is_dead[h] ? 1.0f : 0.0f);
    }
    __threadfence();
    ptx::named_barrier_sync(kGroup + group, 128);
    if (thread == 0) {
      int const before = atomicAdd(p.split_arrivals + first * T::kMultipliers + group, 1);
      s.is_last_arriver[group] = before == work.num_splits - 1;
      __threadfence();
    }
    ptx::named_barrier_sync(kGroup + group, 128);
    if (!s.is_last_arriver[group]) return false;
    float top[2] = {-INFINITY, -INFINITY};
    for (int i = 0; i < work.num_splits; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = fmaxf(top[h], __ldcg(part(i) + (kOuts + h) * 128));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      rows.reference[h] = top[h], rows.sum[h] = 0.0f, rows.largest[h] = -INFINITY;
      is_dead[h] = __ldcg(part(0) + (kOuts + 6 + h) * 128) != 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOuts; ++i) out[i] = 0.0f;
    for (int i = 0; i < work.num_splits; ++i) {
      float const* const theirs = part(i);
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factor[h] = top[h] == -INFINITY ? 0.0f : exp2_approx(__ldcg(theirs + (kOuts + h) * 128) - top[h]);
        // store() sums over the four lanes of a row: one of them brings the sum.
        if (thread % 4 == 0) rows.sum[h] += factor[h] * __ldcg(theirs + (kOuts + 2 + h) * 128);
        rows.largest[h] = fmaxf(rows.largest[h], __ldcg(theirs + (kOuts + 4 + h) * 128));
      }
#pragma unroll
      for (int j = 0; j < kOuts; ++j) out[j] = fmaf(__ldcg(theirs + j * 128), factor[j / 2 % 2], out[j]);
    }
    return true;
  }

  __device__ static __forceinline__ void store(FwdParams const& p, FwdWork const& work, float (&out)[kOuts], Rows& rows,
                                               bool const (&is_dead)[2], float natural, int row_in_tile) {
    int const lane = threadIdx.x % 32;
    float top = -INFINITY;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = rows.sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      bool const is_live = row_in_tile + 8 * h < work.num_rows;
      int64_t const row = work.row0 + row_in_tile + 8 * h;
      bool const sees_keys = rows.reference[h] != -INFINITY;
      float lse = sees_keys ? rows.reference[h] * kLn2 + logf(sum) : -INFINITY;
      factor[h] = sees_keys ? 1.0f / sum : 0.0f;
      if (p.sink != nullptr && (work.flags & plan::kFirst) != 0 && is_live) {
        float const sink = sink_lse(p, row, work.head);
        if (sink == INFINITY) {
          lse = INFINITY, factor[h] = 0.0f;
        } else if (sink != -INFINITY) {
          float const hi = fmaxf(lse, sink);
          float const both = hi + logf(exp2f((lse - hi) * kLog2e) + exp2f((sink - hi) * kLog2e));
          factor[h] *= exp2f((lse - both) * kLog2e);
          lse = both;
        }
      }
      if (is_dead[h]) lse = INFINITY, factor[h] = 0.0f;
      if (is_live) {
        top = fmaxf(top, rows.largest[h]);
        if (lane % 4 == 0) p.lse[row * p.lse_strides[0] + work.head * p.lse_strides[1]] = lse;
      }
    }
    if (p.max_logits != nullptr) {
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
      if (lane == 0 && top != -INFINITY) {
        float const value = top * natural + 0.0f;  // + 0: no negative zero, whose bits are out of order
        if (value >= 0) {
          atomicMax(reinterpret_cast<int*>(p.max_logits + work.head), __float_as_int(value));
        } else {
          atomicMin(reinterpret_cast<unsigned*>(p.max_logits + work.head), __float_as_uint(value));
        }
      }
    }
    bool const is_last = (work.flags & plan::kLast) != 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bool const is_live = row_in_tile + 8 * h < work.num_rows;
      int64_t const row = work.row0 + row_in_tile + 8 * h;
      if (is_last) {
        auto* const to = static_cast<Element*>(p.out) + row * p.out_strides[0] + work.head * p.out_strides[1];
        int const t = lane % 4;
#pragma unroll
        for (int c = 0; c < kDv; c += 32) {  // a quad transposes 4 x 4 registers, so that a lane holds 8 columns
          uint32_t r[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            int const i = (c + 8 * b) / 2 + 2 * h;
            r[b] = pack<Element>(out[i] * factor[h], out[i + 1] * factor[h]);
          }
          transpose_quad(r);
          if (is_live && c + 8 * t < p.head_dim_v) {
            *reinterpret_cast<uint4*>(to + c + 8 * t) = uint4{r[0], r[1], r[2], r[3]};
          }
        }
      } else if (is_live) {
        float* const to = p.out_acc + row * p.out_acc_strides[0] + work.head * p.out_acc_strides[1];
#pragma unroll
        for (int c = 0; c < kDv; c += 8) {
          int const col = c + 2 * (lane % 4), i = c / 2 + 2 * h;
          if (col < p.head_dim_v) {
            *reinterpret_cast<float2*>(to + col) = float2{out[i] * factor[h], out[i + 1] * factor[h]};
          }
        }
      }
    }
  }

  __device__ static void run(SharedStorage& s, FwdParams const& p, FwdMaps const& maps) {
    int const group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
      ptx::prefetch_tensor_map(&maps.q);
      ptx::prefetch_tensor_map(&maps.k);
      ptx::prefetch_tensor_map(&maps.v);
      for (int i = 0; i < T::kQSlots; ++i) {
        ptx::mbarrier_init(&s.q_full[i], 1);
        ptx::mbarrier_init(&s.q_empty[i], kQWarps);
      }
      for (int i = 0; i < kBatches; ++i) {
        ptx::mbarrier_init(&s.batch_full[i], 1);
        ptx::mbarrier_init(&s.batch_empty[i], 1);
      }
      for (int i = 0; i < T::kStages; ++i) {
        ptx::mbarrier_init(&s.k_full[i], 1);
        ptx::mbarrier_init(&s.v_full[i], 1);
        ptx::mbarrier_init(&s.k_empty[i], kQWarps);
        ptx::mbarrier_init(&s.v_empty[i], kQWarps);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (group == 0) {
      ptx::registers_decrease<T::kLoaderRegisters>();
      int const warp = __shfl_sync(0xffffffffu, int(threadIdx.x) / 32, 0);
      if (warp == 0) {
        if (ptx::elect_one()) load(s, p, maps);
      } else if (warp == 1) {
        plan_ahead(s, p);
      }
    } else {
      ptx::registers_increase<T::kMultiplierRegisters>();
      multiply(s, p, group - 1);
    }
  }
};

template <class T>
__global__ __launch_bounds__(T::kThreads, 1) void attn_fwd_kernel(FwdParams const __grid_constant__ params,
                                                                  FwdMaps const __grid_constant__ maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  FwdKernel<T>::run(*reinterpret_cast<typename FwdKernel<T>::SharedStorage*>(shared), params, maps);
}

}  // namespace magi::attn
