#include "launch/sm90/attn_bwd.cuh"

static magi::attn::BwdRegistration<magi::attn::BwdTraits<__nv_bfloat16, 128, 128, magi::attn::Scaled>> const
    registration;
