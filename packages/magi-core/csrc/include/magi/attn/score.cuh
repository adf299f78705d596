// What becomes of a raw product q.k before the mask, and the factor that takes the result to base-2 logarithms.
#pragma once

namespace magi::attn {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// score = softmax_scale * x: the factor is left to the exponent, so a raw product passes unchanged.
struct Scaled {
  float softmax_scale;
  __device__ __forceinline__ Scaled(float softmax_scale, float) : softmax_scale(softmax_scale) {}
  static constexpr bool kIsIdentity = true;
  __device__ __forceinline__ float operator()(float x) const { return x; }
  __device__ __forceinline__ float slope(float) const { return 1.0f; }        // d result / d (softmax_scale * x)
  __device__ __forceinline__ float natural() const { return softmax_scale; }  // result -> score, natural log
  __device__ __forceinline__ float log2() const { return softmax_scale * kLog2e; }
};

// score = softcap * tanh(softmax_scale * x / softcap).
struct Softcapped {
  float softcap, factor;
  __device__ __forceinline__ Softcapped(float softmax_scale, float softcap)
      : softcap(softcap), factor(softmax_scale / softcap) {}
  static constexpr bool kIsIdentity = false;
  __device__ __forceinline__ float operator()(float x) const { return softcap * tanh_approx(x * factor); }
  __device__ __forceinline__ float slope(float score) const {
    float const t = score / softcap;
    return 1.0f - t * t;
  }
  __device__ __forceinline__ float natural() const { return 1.0f; }
  __device__ __forceinline__ float log2() const { return kLog2e; }
};

}  // namespace magi::attn
