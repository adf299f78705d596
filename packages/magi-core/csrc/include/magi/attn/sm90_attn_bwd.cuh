// Attention backward, sm90. With p = exp(s - lse) and dS = p * (dP - delta), dP = dout v^T:
//   dv = p^T dout,   dk = softmax_scale * dS^T q,   dq = softmax_scale * dS k.
//
// A CTA owns one (key tile, kv head, subset of its query heads): k and v stay in shared memory, q and dout stream in
// steps of 64 rows, head after head, so dk and dv are written once. Warpgroup 0 reads the plan and loads; warpgroups 1
// and 2 own 64 keys each and compute everything transposed: S^T and dP^T leave p^T and dS^T in registers where they
// are the left operands of dv and dk. dS also goes to shared memory, from where each warpgroup makes half the columns
// of dq, which the copy engine adds to a float32 workspace. The products are issued so that the tensor cores always
// have one ahead: dP runs under the exponentials, dv under dS, the next step's S under the copy of dq.
//
// Source: FlashAttention-2/3 (arXiv:2307.08691, arXiv:2407.08608). Differs in: steps and masks come from a FlexPlan;
// query heads are looped inside; the workspace of dq is laid out for one contiguous reduction per warpgroup.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "magi/attn/element.cuh"
#include "magi/attn/params.h"
#include "magi/attn/score.cuh"
#include "magi/plan_format.h"
#include "magi/ptx/mbarrier.cuh"
#include "magi/ptx/stmatrix.cuh"
#include "magi/ptx/tma.cuh"
#include "magi/ptx/wgmma.cuh"

namespace magi::attn {

template <class Element_, int kHeadDim_, int kHeadDimV_, class Score_>
struct BwdTraits {
  using Element = Element_;
  using Score = Score_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kStages = 2;
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0, "a head dim must fill whole 64-element swizzle blocks");
  static_assert(kHeadDim + kHeadDimV <= 256, "dk and dv of 64 keys must fit a warpgroup's registers");
  static constexpr int kBlockM = 64, kBlockN = 128;
  static constexpr int kMultipliers = 2, kThreads = 128 * (1 + kMultipliers);
  static constexpr int kLoaderRegisters = 24, kMultiplierRegisters = 240;
  static_assert(128 * (kLoaderRegisters + kMultipliers * kMultiplierRegisters) <= 65536, "the register file is full");
};

struct BwdMaps {
  CUtensorMap q, k, v, dout;  // (dim, token, head); boxes of 64 x 64 rows (q, dout) or 64 x 128 rows (k, v)
  CUtensorMap rows;           // (4, row, head) float32: lse, delta; boxes of 64 rows
};

struct alignas(16) BwdStep {
  int row0, num_rows;  // query rows
  int head, job_class;
  int a, b;    // one band: k - q from a to b. many: word offset of the bit matrix's row for row0
  int q0, q1;  // one band: its rows
  int k0, k1;  // one band: its keys
  int unused[2];
};

struct alignas(16) BwdWork {
  int col0, num_cols;  // keys of the tile
  int kv_head;
  int num_steps;  // of all heads together; -1: no more work
  int split, num_splits, split_slot, unused;
};

struct alignas(16) BwdBatch {
  static constexpr int kJobs = 8;
  BwdWork work;
  int num_jobs, head;
  bool is_first, is_last;  // of its item
  struct alignas(16) Job {
    int begin, end;
    int job_class, a, b, q0, q1, k0, k1;
  } jobs[kJobs];
};

template <class T>
struct BwdKernel {
  using Element = typename T::Element;
  static constexpr int kM = T::kBlockM, kN = T::kBlockN, kD = T::kHeadDim, kDv = T::kHeadDimV;
  static constexpr uint32_t kQBytes = kM * kD * 2, kDoutBytes = kM * kDv * 2, kKBytes = kN * kD * 2,
                            kVBytes = kN * kDv * 2;
  static constexpr uint32_t kRowBytes = kM * 16;
  static constexpr int kWarps = 4 * T::kMultipliers, kBatches = 2;
  static constexpr int kDqCols = kD / T::kMultipliers;  // of one warpgroup

  struct SharedStorage {
    alignas(1024) uint8_t k[kKBytes];
    alignas(1024) uint8_t v[kVBytes];
    alignas(1024) uint8_t q[T::kStages][kQBytes];
    alignas(1024) uint8_t dout[T::kStages][kDoutBytes];
    alignas(1024) uint8_t ds[2][kN * kM * 2];                        // [key][query], swizzled
    alignas(1024) float dq[T::kMultipliers][kDqCols / 32][kM * 32];  // as in DqWorkspace
    alignas(128) float4 rows[T::kStages][kM];                        // x: lse, base 2; y: delta
    BwdStep steps[T::kStages];
    BwdWork work;
    BwdBatch batches[kBatches];
    alignas(8) uint64_t k_full, v_full, kv_empty;
    uint64_t q_full[T::kStages], q_empty[T::kStages], dout_full[T::kStages], dout_empty[T::kStages];
    uint64_t batch_full[kBatches], batch_empty[kBatches];
  };
  static_assert(sizeof(SharedStorage) <= 232448, "more shared memory than a CTA may have");

  enum Barrier : int { kBoth = 1, kGroup = 2 };  // named barriers: both multipliers, and one each

  // ---- planner ---------------------------------------------------------------------------------------------------

  __device__ static void plan_ahead(SharedStorage& s, BwdParams const& p) {
    int const lane = threadIdx.x % 32;
    int32_t const* const plan = p.plan;
    int const num_items = plan[plan::kNumBwdItems];
    auto const* const items = reinterpret_cast<plan::Item const*>(plan + plan[plan::kBwdItems]);
    auto const* const tiles = reinterpret_cast<plan::Tile const*>(plan + plan[plan::kBwdTiles]);
    auto const* const jobs = reinterpret_cast<plan::Job const*>(plan + plan[plan::kBwdJobs]);
    auto const* const bands = reinterpret_cast<plan::Band const*>(plan + plan[plan::kBands]);
    int const masks = plan[plan::kMasks];
    int const group = p.num_heads_q / p.num_heads_kv;
    int const section_kv =
        plan[plan::kSectionHeads] > 0 ? min(plan[plan::kSectionHeads], p.num_heads_kv) : p.num_heads_kv;
    int const section_size = num_items * section_kv;
    int const total = num_items * p.num_heads_kv;
    ptx::RingState<kBatches> ring;

    for (int position = blockIdx.x; position < total;) {
      int next = 0;
      if (lane == 0) next = atomicAdd(p.counter, 1) + gridDim.x;
      int const section = position / section_size, in_section = position - section * section_size;
      int const section_heads = min(section_kv, p.num_heads_kv - section * section_kv);
      int const item_index = in_section / section_heads;
      int const kv_head = section * section_kv + in_section - item_index * section_heads;
      plan::Item const item = items[item_index];
      plan::Tile const tile = tiles[item.tile];
      int const head_end = item.head_end > item.head_begin ? min(item.head_end, group) : group;  // 0, 0: any group

      int num_steps = 0;
      for (int index = item.job_begin + lane; index < item.job_end; index += 32) {
        int const begin = max(jobs[index].begin, item.clip_begin), end = min(jobs[index].end, item.clip_end);
        num_steps += max(0, end - begin + kM - 1) / kM;
      }
      num_steps = __reduce_add_sync(0xffffffffu, num_steps) * (head_end - item.head_begin);

      for (int head = item.head_begin; head < head_end; ++head) {
        int first = item.job_begin;
        do {
          BwdBatch& batch = s.batches[ring.slot];
          int const index = first + lane;
          bool const has_job = lane < BwdBatch::kJobs && index < item.job_end;
          typename BwdBatch::Job ahead{};
          if (has_job) {
            plan::Job const job = jobs[index];
            ahead.begin = max(job.begin, item.clip_begin), ahead.end = min(job.end, item.clip_end);
            ahead.job_class = job.job_class;
            if (job.job_class == plan::kOneBand) {
              plan::Band const band = bands[job.index];
              ahead.a = band.lo, ahead.b = band.hi, ahead.q0 = band.q0, ahead.q1 = band.q1;
              ahead.k0 = band.k0, ahead.k1 = band.k1;
            } else {
              ahead.a = masks + job.index * plan::kMaskWords + 4 * (ahead.begin - job.begin);
            }
          }
          ptx::mbarrier_wait(&s.batch_empty[ring.slot], ring.phase ^ 1);
          if (has_job) batch.jobs[lane] = ahead;
          if (lane == 0) {
            batch.work = BwdWork{tile.begin, tile.end - tile.begin, kv_head,         num_steps,
                                 item.split, tile.num_splits,       tile.split_slot, 0};
            batch.head = kv_head * group + head;
            batch.num_jobs = min(BwdBatch::kJobs, item.job_end - first);
            batch.is_first = head == item.head_begin && first == item.job_begin;
            batch.is_last = head == head_end - 1 && first + BwdBatch::kJobs >= item.job_end;
          }
          __syncwarp();
          if (lane == 0) ptx::mbarrier_arrive(&s.batch_full[ring.slot]);
          ring.advance();
          first += BwdBatch::kJobs;
        } while (first < item.job_end);
      }
      position = __shfl_sync(0xffffffffu, next, 0);
    }
    ptx::mbarrier_wait(&s.batch_empty[ring.slot], ring.phase ^ 1);
    if (lane == 0) {
      s.batches[ring.slot].work.num_steps = -1;
      s.batches[ring.slot].is_first = true;
      ptx::mbarrier_arrive(&s.batch_full[ring.slot]);
    }
  }

  // ---- loader ----------------------------------------------------------------------------------------------------

  __device__ static void load(SharedStorage& s, BwdParams const& p, BwdMaps const& maps) {
    ptx::RingState<T::kStages> step_ring;
    ptx::RingState<kBatches> ring;
    uint32_t kv_phase = 0;
    while (true) {
      ptx::mbarrier_wait(&s.batch_full[ring.slot], ring.phase);
      BwdBatch const& batch = s.batches[ring.slot];
      int const num_steps = batch.work.num_steps;
      if (batch.is_first) {
        ptx::mbarrier_wait(&s.kv_empty, kv_phase ^ 1);
        kv_phase ^= 1;
        s.work = batch.work;
        if (num_steps > 0) {
          ptx::mbarrier_arrive_expect(&s.k_full, kKBytes);
#pragma unroll 1
          for (int c = 0; c < kD / 64; ++c) {
            ptx::tma_load_3d(s.k + c * kN * 128, &maps.k, &s.k_full, c * 64, batch.work.col0, batch.work.kv_head);
          }
          ptx::mbarrier_arrive_expect(&s.v_full, kVBytes);
#pragma unroll 1
          for (int c = 0; c < kDv / 64; ++c) {
            ptx::tma_load_3d(s.v + c * kN * 128, &maps.v, &s.v_full, c * 64, batch.work.col0, batch.work.kv_head);
          }
        } else {
          ptx::mbarrier_arrive(&s.k_full);
          ptx::mbarrier_arrive(&s.v_full);
        }
      }
      if (num_steps < 0) break;
      int const head = batch.head;
      for (int j = 0; j < batch.num_jobs; ++j) {
        auto const& job = batch.jobs[j];
        for (int row0 = job.begin; row0 < job.end; row0 += kM) {
          int const slot = step_ring.slot;
          ptx::mbarrier_wait(&s.q_empty[slot], step_ring.phase ^ 1);
          BwdStep& step = s.steps[slot];
          step.row0 = row0, step.num_rows = min(kM, job.end - row0);
          step.head = head, step.job_class = job.job_class;
          step.a = job.job_class == plan::kMany ? job.a + 4 * (row0 - job.begin) : job.a, step.b = job.b;
          step.q0 = job.q0, step.q1 = job.q1, step.k0 = job.k0, step.k1 = job.k1;
          ptx::mbarrier_arrive_expect(&s.q_full[slot], kQBytes + kRowBytes);
#pragma unroll 1
          for (int c = 0; c < kD / 64; ++c) {
            ptx::tma_load_3d(s.q[slot] + c * kM * 128, &maps.q, &s.q_full[slot], c * 64, row0, head);
          }
          ptx::tma_load_3d(s.rows[slot], &maps.rows, &s.q_full[slot], 0, row0, head);
          ptx::mbarrier_wait(&s.dout_empty[slot], step_ring.phase ^ 1);
          ptx::mbarrier_arrive_expect(&s.dout_full[slot], kDoutBytes);
#pragma unroll 1
          for (int c = 0; c < kDv / 64; ++c) {
            ptx::tma_load_3d(s.dout[slot] + c * kM * 128, &maps.dout, &s.dout_full[slot], c * 64, row0, head);
          }
          step_ring.advance();
        }
      }
      ptx::mbarrier_arrive(&s.batch_empty[ring.slot]);
      ring.advance();
    }
  }

  // ---- multipliers -----------------------------------------------------------------------------------------------

  // A thread's accumulators of S^T: element i is key (lane / 4) + 8 * (i / 2 % 2), query 8 * (i / 4) + 2 * (lane % 4) +
  // i % 2.
  static constexpr int kScores = kM / 2, kDks = kD / 2, kDvs = kDv / 2, kDqs = kDqCols / 2;

  // d = a b^T over kDims, both [rows][dims] in blocks of 64 dims.
  template <int kDims>
  __device__ static __forceinline__ void issue_scores(float (&d)[kScores], uint32_t a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < kDims / 16; ++i) {
      ptx::Wgmma<Element, kM>::template ss<0, 0>(d, ptx::wgmma_descriptor(a + (i / 4) * kN * 128 + (i % 4) * 32),
                                                 ptx::wgmma_descriptor(b + (i / 4) * kM * 128 + (i % 4) * 32), i > 0);
    }
    ptx::wgmma_commit();
  }

  // d += a b for 64 keys x 64 queries in registers and b [queries][dims].
  template <int kDims>
  __device__ static __forceinline__ void issue_grad(float (&d)[kDims / 2], uint32_t (&a)[kScores / 2], uint32_t b) {
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      uint32_t const fragment[4] = {a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]};
      ptx::Wgmma<Element, kDims>::template rs<1>(d, fragment, ptx::wgmma_descriptor(b + i * 2048, kM * 128), 1);
    }
    ptx::wgmma_commit();
  }

  // dk += dS^T q for 64 keys x 64 queries in shared memory.
  __device__ static __forceinline__ void issue_dk(float (&d)[kDks], uint32_t ds, uint32_t q) {
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) {
      ptx::Wgmma<Element, kD>::template ss<0, 1>(d, ptx::wgmma_descriptor(ds + i * 32),
                                                 ptx::wgmma_descriptor(q + i * 2048, kM * 128), 1);
    }
    ptx::wgmma_commit();
  }

  __device__ static __forceinline__ void issue_dq(float (&d)[kDqs], uint32_t ds, uint32_t k) {
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      ptx::Wgmma<Element, kDqCols>::template ss<1, 1>(d, ptx::wgmma_descriptor(ds + i * 2048),
                                                      ptx::wgmma_descriptor(k + i * 2048, kN * 128), i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ static __forceinline__ uint32_t load_word(int32_t const* p) {
    uint32_t x;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
  }

  __device__ static __forceinline__ void apply_mask(float (&scores)[kScores], BwdStep const& step, int32_t const* plan,
                                                    BwdWork const& work, int key_in_tile) {
    int const lane_col = 2 * (threadIdx.x % 4);
    if (step.job_class == plan::kMany) {
#pragma unroll
      for (int c = 0; c < kM; c += 8) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const row = c + lane_col + e;
          uint32_t const bits =
              row < step.num_rows ? load_word(plan + step.a + 4 * row + key_in_tile / 32) >> key_in_tile % 32 : 0;
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& x = scores[c / 8 * 4 + 2 * h + e];
            x = (bits >> 8 * h & 1) != 0 ? x : -INFINITY;
          }
        }
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const key = work.col0 + key_in_tile + 8 * h;
      int first = 0, last = step.num_rows - 1;
      if (key_in_tile + 8 * h >= work.num_cols) last = -1;
      if (step.job_class == plan::kOneBand) {
        first = max(key - step.b, step.q0) - step.row0;
        last = min(last, min(key - step.a, step.q1 - 1) - step.row0);
        if (key < step.k0 || key >= step.k1) last = -1;
      }
      first -= lane_col, last -= lane_col;
#pragma unroll
      for (int c = 0; c < kM; c += 8) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = scores[c / 8 * 4 + 2 * h + e];
          x = c + e >= first && c + e <= last ? x : -INFINITY;
        }
      }
    }
  }

  // Keys that no slice covers may hold NaN, which a product with 0 would keep: clear what is not finite in this
  // warpgroup's 64 rows. Covered keys are finite by contract.
  template <int kDims>
  __device__ static __forceinline__ void clear_nonfinite_rows(uint8_t* tile, int group) {
#pragma unroll 1
    for (int c = 0; c < kDims / 64; ++c) {
      auto* const words = reinterpret_cast<uint4*>(tile + c * kN * 128 + group * 64 * 128);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 x = words[i * 128 + threadIdx.x % 128];
        x.x = clear_nonfinite<Element>(x.x), x.y = clear_nonfinite<Element>(x.y);
        x.z = clear_nonfinite<Element>(x.z), x.w = clear_nonfinite<Element>(x.w);
        words[i * 128 + threadIdx.x % 128] = x;
      }
    }
  }

  __device__ static void multiply(SharedStorage& s, BwdParams const& p, int group) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    int const key_in_tile = 64 * group + 16 * warp + lane / 4;
    typename T::Score const score(p.softmax_scale, p.softcap);
    float const scale_log2 = score.log2();
    uint32_t const k_rows = ptx::smem_address(s.k) + group * 64 * 128;
    uint32_t const v_rows = ptx::smem_address(s.v) + group * 64 * 128;
    // The columns of dq that this warpgroup makes: whole 64-element blocks, or half of one.
    uint32_t const k_cols =
        ptx::smem_address(s.k) + (kDqCols % 64 == 0 ? group * (kDqCols / 64) * kN * 128 : group * 64);
    uint32_t const ds_row =  // stmatrix: the row whose address this lane gives
        ptx::smem_address(s.ds[0]) + (64 * group + 16 * warp + lane % 16) * 128;
    ptx::RingState<T::kStages> ring;
    uint32_t kv_phase = 0;
    int ds_buffer = 0;

    auto release = [&](uint64_t* barrier) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barrier);
    };

    while (true) {
      ptx::mbarrier_wait(&s.k_full, kv_phase);
      BwdWork const work = s.work;
      if (work.num_steps < 0) break;
      float dk[kDks], dv[kDvs];
#pragma unroll
      for (int i = 0; i < kDks; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kDvs; ++i) dv[i] = 0.0f;
      ptx::mbarrier_wait(&s.v_full, kv_phase);
      kv_phase ^= 1;

      if (work.num_steps > 0) {
        clear_nonfinite_rows<kD>(s.k, group);
        clear_nonfinite_rows<kDv>(s.v, group);
        ptx::fence_async_shared();
        ptx::named_barrier_sync(kBoth, 256);

        float scores[kScores];
        ptx::mbarrier_wait(&s.q_full[ring.slot], ring.phase);
        ptx::wgmma_pin(scores);
        ptx::wgmma_fence();
        issue_scores<kD>(scores, k_rows, ptx::smem_address(s.q[ring.slot]));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(scores);

#pragma unroll 1
        for (int n = 0; n < work.num_steps; ++n) {
          BwdStep const& step = s.steps[ring.slot];
          uint32_t const q = ptx::smem_address(s.q[ring.slot]), dout = ptx::smem_address(s.dout[ring.slot]);
          float grads[kScores];  // dP^T, then dS^T
          uint32_t probs[kScores / 2], dscores[kScores / 2];

          ptx::mbarrier_wait(&s.dout_full[ring.slot], ring.phase);
          ptx::wgmma_pin(grads);
          ptx::wgmma_fence();
          issue_scores<kDv>(grads, v_rows, dout);

          if constexpr (!T::Score::kIsIdentity) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) scores[i] = score(scores[i]);
          }
          float slope[T::Score::kIsIdentity ? 1 : kScores];
          if constexpr (!T::Score::kIsIdentity) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) slope[i] = score.slope(scores[i]);
          }
          if (step.job_class != plan::kFull || step.num_rows < kM || work.num_cols < kN) {
            apply_mask(scores, step, p.plan, work, key_in_tile);
          }
#pragma unroll
          for (int c = 0; c < kM; c += 8) {
            float4 const* const row = &s.rows[ring.slot][c + 2 * (lane % 4)];
            float2 const lse{row[0].x, row[1].x};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float* const x = scores + c / 2 + 2 * h;
              x[0] = exp2_approx(fmaf(x[0], scale_log2, -lse.x));
              x[1] = exp2_approx(fmaf(x[1], scale_log2, -lse.y));
            }
          }
#pragma unroll
          for (int i = 0; i < kScores / 2; ++i) probs[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
          ptx::wgmma_pin(probs);
          ptx::wgmma_pin(dv);
          ptx::wgmma_fence();
          issue_grad<kDv>(dv, probs, dout);
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(grads);
#pragma unroll
          for (int c = 0; c < kM; c += 8) {
            float4 const* const row = &s.rows[ring.slot][c + 2 * (lane % 4)];
            float2 const delta{row[0].y, row[1].y};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              int const i = c / 2 + 2 * h;
              grads[i] = scores[i] * (grads[i] - delta.x);
              grads[i + 1] = scores[i + 1] * (grads[i + 1] - delta.y);
              if constexpr (!T::Score::kIsIdentity) grads[i] *= slope[i], grads[i + 1] *= slope[i + 1];
              dscores[i / 2] = pack<Element>(grads[i], grads[i + 1]);
            }
          }
#pragma unroll
          for (int i = 0; i < kM / 16; ++i) {
            uint32_t const chunk = (2 * i + lane / 16) ^ (lane % 8);
            ptx::stmatrix_x4(ds_row + ds_buffer * kN * kM * 2 + chunk * 16, dscores[4 * i], dscores[4 * i + 1],
                             dscores[4 * i + 2], dscores[4 * i + 3]);
          }
          ptx::fence_async_shared();
          if (thread == 0) ptx::bulk_wait_read<0>();  // the last step's dq has left shared memory
          ptx::named_barrier_sync(kBoth, 256);        // dS is whole
          float dq[kDqs];
          uint32_t const ds = ptx::smem_address(s.ds[ds_buffer]);
          ds_buffer ^= 1;
          ptx::wgmma_pin(dq);
          ptx::wgmma_pin(dk);
          ptx::wgmma_fence();
          issue_dq(dq, ds, k_cols);
          issue_dk(dk, ds + group * 64 * 128, q);

          int const row0 = step.row0, num_rows = step.num_rows, head = step.head;
          int const slot = ring.slot;
          ring.advance();
          // After the last step the product is repeated and thrown away: were it conditional, ptxas would wait for
          // every product where it is issued.
          bool const has_next = n + 1 < work.num_steps;
          if (has_next) ptx::mbarrier_wait(&s.q_full[ring.slot], ring.phase);
          ptx::wgmma_wait<2>();
          ptx::wgmma_pin(dv);
          ptx::wgmma_pin(probs);
          release(&s.dout_empty[slot]);
          ptx::wgmma_pin(scores);
          ptx::wgmma_fence();
          issue_scores<kD>(scores, k_rows, ptx::smem_address(s.q[has_next ? ring.slot : slot]));
          ptx::wgmma_wait<2>();
          ptx::wgmma_pin(dq);

#pragma unroll
          for (int i = 0; i < kDqs; i += 2) {
            int const row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), col = 8 * (i / 4) + 2 * (lane % 4);
            int const chunk = (col / 4 % 8) ^ (2 * ((row0 + row) % 4));
            *reinterpret_cast<float2*>(&s.dq[group][col / 32][row * 32 + chunk * 4 + col % 4]) =
                float2{dq[i] * p.dq_scale, dq[i + 1] * p.dq_scale};
          }
          ptx::fence_async_shared();
          ptx::named_barrier_sync(kGroup + group, 128);
          if (thread == 0) {
#pragma unroll
            for (int b = 0; b < kDqCols / 32; ++b) {
              int const block = group * (kDqCols / 32) + b;
              if (block < p.dq.num_blocks) {
                float* const to =
                    p.dq.words + ((int64_t(head) * p.dq.num_blocks + block) * p.dq.row_capacity + row0) * 32;
                ptx::bulk_reduce_add_f32(to, s.dq[group][b], num_rows * 128);
              }
            }
            ptx::bulk_commit();
          }
          ptx::wgmma_wait<1>();
          ptx::wgmma_pin(dk);
          release(&s.q_empty[slot]);
          ptx::wgmma_wait<0>();
          ptx::wgmma_pin(scores);
        }
      }
      release(&s.kv_empty);
      // A part of a split tile goes to the workspace as float32; a kernel that follows adds the parts in order.
      bool const is_part = work.num_splits > 1;
      // (A plan with too many parts is that kernel's to refuse: a trap here makes ptxas run short of registers.)
      int const part =
          is_part ? min((work.split_slot + work.split) * p.num_heads_kv + work.kv_head, p.split_capacity - 1) : 0;
      store<kD>(is_part, part, 0, p, p.dk, p.is_dk_float, p.dk_strides, p.head_dim, dk, p.softmax_scale, work,
                key_in_tile);
      store<kDv>(is_part, part, kN * kD, p, p.dv, p.is_dv_float, p.dv_strides, p.head_dim_v, dv, 1.0f, work,
                 key_in_tile);
    }
    if (thread == 0) ptx::bulk_wait<0>();  // shared memory must outlive the copies
  }

  // Rows key_in_tile and key_in_tile + 8 of a gradient, as float32.
  template <int kDims>
  __device__ static __forceinline__ void store_float(float* to, int64_t next_row, int dims, float (&x)[kDims / 2],
                                                     float factor, bool is_first_live, bool is_second_live) {
#pragma unroll
    for (int h = 0; h < 2; ++h, to += next_row) {
      if (!(h == 0 ? is_first_live : is_second_live)) continue;
#pragma unroll
      for (int c = 0; c < kDims; c += 8) {
        int const col = c + 2 * (threadIdx.x % 4), i = c / 2 + 2 * h;
        if (col < dims) *reinterpret_cast<float2*>(to + col) = float2{x[i] * factor, x[i + 1] * factor};
      }
    }
  }

  template <int kDims>
  __device__ static __forceinline__ void store(bool is_part, int part, int part_offset, BwdParams const& p, void* to,
                                               bool is_float, int64_t const (&strides)[2], int dims,
                                               float (&x)[kDims / 2], float factor, BwdWork const& work,
                                               int key_in_tile) {
    bool const is_first_live = key_in_tile < work.num_cols, is_second_live = key_in_tile + 8 < work.num_cols;
    int64_t const at = (work.col0 + key_in_tile) * strides[0] + work.kv_head * strides[1];
    if (is_part || is_float) {
      float* const row = is_part
                             ? p.split_workspace + int64_t(part) * kN * (kD + kDv) + part_offset + key_in_tile * kDims
                             : static_cast<float*>(to) + at;
      store_float<kDims>(row, is_part ? 8 * kDims : 8 * strides[0], is_part ? kDims : dims, x, factor, is_first_live,
                         is_second_live);
      return;
    }
    int const t = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto* const row = static_cast<Element*>(to) + at + h * 8 * strides[0];
#pragma unroll
      for (int c = 0; c < kDims; c += 32) {
        uint32_t r[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          int const i = (c + 8 * b) / 2 + 2 * h;
          r[b] = pack<Element>(x[i] * factor, x[i + 1] * factor);
        }
        transpose_quad(r);
        if ((h == 0 ? is_first_live : is_second_live) && c + 8 * t < dims) {
          *reinterpret_cast<uint4*>(row + c + 8 * t) = uint4{r[0], r[1], r[2], r[3]};
        }
      }
    }
  }

  __device__ static void run(SharedStorage& s, BwdParams const& p, BwdMaps const& maps) {
    int const group = __shfl_sync(0xffffffffu, int(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
      for (CUtensorMap const* map : {&maps.q, &maps.k, &maps.v, &maps.dout, &maps.rows}) ptx::prefetch_tensor_map(map);
      ptx::mbarrier_init(&s.k_full, 1);
      ptx::mbarrier_init(&s.v_full, 1);
      ptx::mbarrier_init(&s.kv_empty, kWarps);
      for (int i = 0; i < T::kStages; ++i) {
        ptx::mbarrier_init(&s.q_full[i], 1);
        ptx::mbarrier_init(&s.dout_full[i], 1);
        ptx::mbarrier_init(&s.q_empty[i], kWarps);
        ptx::mbarrier_init(&s.dout_empty[i], kWarps);
      }
      for (int i = 0; i < kBatches; ++i) {
        ptx::mbarrier_init(&s.batch_full[i], 1);
        ptx::mbarrier_init(&s.batch_empty[i], 1);
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
__global__ __launch_bounds__(T::kThreads, 1) void attn_bwd_kernel(BwdParams const __grid_constant__ params,
                                                                  BwdMaps const __grid_constant__ maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  BwdKernel<T>::run(*reinterpret_cast<typename BwdKernel<T>::SharedStorage*>(shared), params, maps);
}

}  // namespace magi::attn
